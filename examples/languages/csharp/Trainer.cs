using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Security.Cryptography;
using Microsoft.ML.OnnxRuntime;
using Microsoft.ML.OnnxRuntime.Tensors;

/// <summary>
/// Trains with onnxruntime's C# binding, over the files that `onward artifacts MODEL --portable` writes. Lift this file out;
/// Program.cs shows how to use it. It goes on from state.bin in the folder.
/// </summary>
sealed class Trainer : IDisposable
{
    /// <summary>A line of the table `onward.inputs`: what an input is, where it begins in a state file, its bytes, type and shape.</summary>
    public sealed class Input
    {
        public readonly string Name, Role;
        public readonly int Offset, Size;
        public readonly long[] Dims;
        readonly TensorElementType type;

        public Input(string name, string line)
        {
            string[] words = line.Split(' ');
            long[] numbers = words.Skip(1).Select(long.Parse).ToArray();
            (Name, Role, Offset, Size) = (name, words[0], (int)numbers[0], (int)numbers[1]);
            (type, Dims) = ((TensorElementType)numbers[2], numbers.Skip(3).ToArray());
        }

        /// <summary>A tensor of these bytes: of as many samples as they are, where the first axis is free.</summary>
        public OrtValue Tensor(ReadOnlySpan<byte> content)
        {
            int samples = content.Length / Size;
            long[] shape = Dims.Select(dim => dim < 0 ? samples : dim).ToArray();
            var value = OrtValue.CreateAllocatedTensorValue(OrtAllocator.DefaultInstance, type, shape);
            content.CopyTo(value.GetTensorMutableRawData());
            return value;
        }
    }

    public readonly List<Input> Inputs; // of the step, in its order: batch, learning rate, state, sums of gradients
    readonly Dictionary<string, OrtValue> values = new Dictionary<string, OrtValue>(); // all but the batch
    readonly string folder, path;
    readonly InferenceSession step, evaluation;
    readonly Dictionary<string, string> about;
    readonly byte[] file;

    /// <summary>Opens the artifacts of a folder. With `accumulates`, several batches can make one update.</summary>
    public Trainer(string folder, bool accumulates = false)
    {
        this.folder = folder;
        step = Open(accumulates ? "accumulate_step.onnx" : "train_step.onnx");
        evaluation = Open("eval_step.onnx");
        about = step.ModelMetadata.CustomMetadataMap;
        if (!about.TryGetValue("onward.portable", out string version) || version != "2")
            throw new InvalidDataException("this is not a portable step of version 2");
        path = Path.Combine(folder, "state.bin");
        file = File.ReadAllBytes(path);
        if (file.Length < 96 || !Checksum().AsSpan().SequenceEqual(file.AsSpan(file.Length - 32)))
            throw new InvalidDataException($"'{path}' is damaged: its content does not match its checksum");
        if (BitConverter.ToString(file, 32, 32).Replace("-", "").ToLowerInvariant() != about["onward.state_digest"])
            throw new InvalidDataException($"'{path}' is the state of another model");
        Inputs = step.InputNames.Zip(about["onward.inputs"].Split('\n'), (name, line) => new Input(name, line)).ToList();
        foreach (Input input in Inputs.Where(input => input.Role != "batch"))
            values[input.Name] = input.Tensor(input.Offset > 0 ? file.AsSpan(input.Offset, input.Size) : new byte[input.Size]);
    }

    /// <summary>How many batches this state has seen.</summary>
    public long Steps => values[Inputs.First(input => input.Role == "steps").Name].GetTensorDataAsSpan<long>()[0];

    /// <summary>
    /// Trains on a batch and returns its loss. A trainer that accumulates multiplies the sum of the gradients by `update`,
    /// 1/4 after four batches, say, and updates by it, where `update` is not 0; any other updates by each batch.
    /// </summary>
    public float Train(Dictionary<string, OrtValue> batch, float rate, float update = 1)
    {
        Span<float> numbers = values[Inputs.First(input => input.Role == "rate").Name].GetTensorMutableDataAsSpan<float>();
        new[] { rate, update }.AsSpan(0, numbers.Length).CopyTo(numbers); // one, where it does not accumulate
        var outputs = Run(step, batch);
        int results = int.Parse(about["onward.results"]), first = Inputs.Count - (outputs.Count - results);
        float loss = CheckedLoss(outputs, results);
        for (int i = 0; i < results; i++) outputs[i].Dispose();
        for (int i = results; i < outputs.Count; i++) // frozen tensors come first and stay
        {
            string name = Inputs[first + i - results].Name;
            values[name].Dispose();
            values[name] = outputs[i];
        }
        return loss;
    }

    public float Evaluate(Dictionary<string, OrtValue> batch)
    {
        using var outputs = Run(evaluation, batch);
        return CheckedLoss(outputs, outputs.Count);
    }

    /// <summary>The outputs of the inference model, which reads the weights that were saved, for the first sample.</summary>
    public float[] Answer(Dictionary<string, OrtValue> batch)
    {
        using InferenceSession session = Open("inference_model.onnx");
        using var outputs = Run(session, batch);
        ReadOnlySpan<float> numbers = outputs[0].GetTensorDataAsSpan<float>();
        return numbers.Slice(0, numbers.Length / (int)outputs[0].GetTensorTypeAndShape().Shape[0]).ToArray();
    }

    /// <summary>Writes all of the state or nothing: what was there stays until the new content is on the disk.</summary>
    public void Save()
    {
        foreach (Input input in Inputs.Where(input => input.Offset > 0))
            values[input.Name].GetTensorMutableRawData().CopyTo(file.AsSpan(input.Offset));
        Checksum().CopyTo(file, file.Length - 32);
        using (FileStream stream = File.Create(path + ".tmp"))
        {
            stream.Write(file, 0, file.Length);
            stream.Flush(flushToDisk: true);
        }
        File.Move(path + ".tmp", path, overwrite: true);
    }

    public void Dispose()
    {
        foreach (OrtValue value in values.Values) value.Dispose();
        step.Dispose();
        evaluation.Dispose();
    }

    InferenceSession Open(string name)
    {
        using var options = new SessionOptions { IntraOpNumThreads = 1 }; // more pay only for large models
        return new InferenceSession(Path.Combine(folder, name), options);
    }

    /// <summary>Runs a model on what it takes of the batch and the state.</summary>
    IDisposableReadOnlyCollection<OrtValue> Run(InferenceSession session, Dictionary<string, OrtValue> batch)
    {
        using var options = new RunOptions();
        OrtValue Find(string name) => batch.TryGetValue(name, out OrtValue value) ? value : values[name];
        return session.Run(options, session.InputNames.ToDictionary(name => name, Find), session.OutputNames);
    }

    /// <summary>The loss; or an error that says what is wrong with the batch, and nothing has changed.</summary>
    float CheckedLoss(IReadOnlyList<OrtValue> outputs, int results)
    {
        ReadOnlySpan<long> problem = outputs[results - 1].GetTensorDataAsSpan<long>(); // a line of `onward.problems`, and a number
        if (problem[0] != 0) throw new InvalidDataException(about["onward.problems"].Split('\n')[problem[0] - 1] + problem[1]);
        return outputs[0].GetTensorDataAsSpan<float>()[0];
    }

    byte[] Checksum()
    {
        using SHA256 sha256 = SHA256.Create();
        return sha256.ComputeHash(file, 0, file.Length - 32);
    }
}
