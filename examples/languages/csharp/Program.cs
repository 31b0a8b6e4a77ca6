// dotnet run -- ARTIFACTS DATA [updates] [batch size] [learning rate] [batches an update]
//
// DATA has a file for each input of the batch, NAME.bin: its samples one after another, little-endian. The program goes
// on from ARTIFACTS/state.bin, trains, evaluates, saves, and answers for one sample with the inference model.

using System;
using System.Collections.Generic;
using System.Globalization;
using System.IO;
using System.Linq;
using Microsoft.ML.OnnxRuntime;

static class Program
{
    static readonly Dictionary<string, byte[]> files = new Dictionary<string, byte[]>();

    static Dictionary<string, OrtValue> ReadBatch(Trainer trainer, string folder, long number, int count)
    {
        var batch = new Dictionary<string, OrtValue>();
        foreach (Trainer.Input input in trainer.Inputs.Where(input => input.Role == "batch"))
        {
            string name = input.Name + ".bin";
            if (!files.TryGetValue(name, out byte[] content)) files[name] = content = File.ReadAllBytes(Path.Combine(folder, name));
            int size = input.Dims[0] < 0 ? input.Size * count : input.Size;
            if (content.Length % input.Size != 0 || content.Length < size)
                throw new InvalidDataException($"'{name}' has {content.Length} bytes, not {size} or more in samples of {input.Size}");
            batch[input.Name] = input.Tensor(content.AsSpan((int)(number % (content.Length / size)) * size, size));
        }
        return batch;
    }

    static int Main(string[] words)
    {
        CultureInfo.CurrentCulture = CultureInfo.InvariantCulture;
        string[] options = words.Concat(new[] { "", "", "100", "32", "1e-3", "1" }.Skip(words.Length)).ToArray();
        int updates = int.Parse(options[2]), size = int.Parse(options[3]), parts = int.Parse(options[5]);
        float rate = float.Parse(options[4]);
        try
        {
            using var trainer = new Trainer(options[0], accumulates: parts > 1);
            for (int i = 0; i < updates * parts; i++)
            {
                var batch = ReadBatch(trainer, options[1], trainer.Steps, size);
                Console.WriteLine($"loss {trainer.Train(batch, rate, i % parts == parts - 1 ? 1f / parts : 0):G9}");
                foreach (OrtValue value in batch.Values) value.Dispose();
            }
            var held = ReadBatch(trainer, options[1], 0, size);
            Console.WriteLine($"evaluation {trainer.Evaluate(held):G9}");
            trainer.Save();
            Console.WriteLine("answer " + string.Join(" ", trainer.Answer(held).Select(value => value.ToString("G9"))));
            return 0;
        }
        catch (Exception error) when (error is IOException || error is InvalidDataException || error is OnnxRuntimeException)
        {
            Console.Error.WriteLine("error: " + error.Message);
            return 1;
        }
    }
}
