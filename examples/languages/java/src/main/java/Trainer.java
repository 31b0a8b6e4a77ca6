import ai.onnxruntime.*;
import java.io.IOException;
import java.nio.*;
import java.nio.file.*;
import java.security.*;
import java.util.*;

/**
 * Trains with onnxruntime's Java binding, over the files that `onward artifacts MODEL --portable` writes. Lift this file
 * out; Train.java shows how to use it. It goes on from state.bin in the folder.
 */
final class Trainer implements AutoCloseable {
    /** A line of the table `onward.inputs`: what an input is, where it begins in a state file, its bytes, type and shape. */
    record Input(String name, String role, int offset, int size, OnnxJavaType type, long[] dims) {
        /** A tensor of some bytes: of as many samples as they are, where the first axis is free. */
        OnnxTensor tensor(byte[] content, int from, int bytes) throws OrtException {
            long[] shape = dims.clone();
            if (shape[0] < 0) shape[0] = bytes / size;
            ByteBuffer buffer = ByteBuffer.allocateDirect(bytes).order(ByteOrder.nativeOrder());
            buffer.put(content, from, bytes).rewind();
            return OnnxTensor.createTensor(OrtEnvironment.getEnvironment(), buffer, shape, type);
        }
    }

    final List<Input> inputs = new ArrayList<>(); // of the step, in its order: batch, rate, state, sums of gradients
    private final Map<String, OnnxTensor> values = new LinkedHashMap<>(); // all but the batch
    private final Path folder;
    private final OrtSession step, evaluation;
    private final Map<String, String> about;
    private final byte[] file;

    /** Opens the artifacts of a folder. With `accumulates`, several batches can make one update. */
    Trainer(Path folder, boolean accumulates) throws OrtException, IOException, GeneralSecurityException {
        this.folder = folder;
        step = open(accumulates ? "accumulate_step.onnx" : "train_step.onnx");
        evaluation = open("eval_step.onnx");
        about = step.getMetadata().getCustomMetadata();
        if (!"2".equals(about.get("onward.portable"))) throw new IOException("this is not a portable step of version 2");
        Path path = folder.resolve("state.bin");
        file = Files.readAllBytes(path);
        if (file.length < 96 || !Arrays.equals(checksum(), 0, 32, file, file.length - 32, file.length))
            throw new IOException("'" + path + "' is damaged: its content does not match its checksum");
        if (!HexFormat.of().formatHex(file, 32, 64).equals(about.get("onward.state_digest")))
            throw new IOException("'" + path + "' is the state of another model");
        Iterator<String> lines = about.get("onward.inputs").lines().iterator();
        for (String name : step.getInputNames()) {
            String[] line = lines.next().split(" ");
            TensorInfo info = (TensorInfo) step.getInputInfo().get(name).getInfo();
            Input input = new Input(name, line[0], Integer.parseInt(line[1]), Integer.parseInt(line[2]), info.type, info.getShape());
            inputs.add(input);
            if (input.role.equals("batch")) continue;
            values.put(name, input.tensor(input.offset > 0 ? file : new byte[input.size], input.offset, input.size));
        }
    }

    /** How many batches this state has seen. */
    long steps() {
        return values.get(only("steps").name).getLongBuffer().get(0);
    }

    /**
     * Trains on a batch and returns its loss. A trainer that accumulates multiplies the sum of the gradients by `update`,
     * 1/4 after four batches, say, and updates by it, where `update` is not 0; any other updates by each batch.
     */
    float train(Map<String, OnnxTensor> batch, float rate, float update) throws OrtException {
        float[] numbers = Arrays.copyOf(new float[] {rate, update}, only("rate").size / 4); // one, where it does not accumulate
        values.put(only("rate").name, OnnxTensor.createTensor(OrtEnvironment.getEnvironment(), numbers)).close();
        OrtSession.Result outputs = run(step, batch);
        int results = Integer.parseInt(about.get("onward.results")), changing = outputs.size() - results; // frozen tensors come first and stay
        float loss = checkedLoss(outputs, results);
        for (int i = 0; i < results; i++) outputs.get(i).close();
        for (int i = 0; i < changing; i++)
            values.put(inputs.get(inputs.size() - changing + i).name, (OnnxTensor) outputs.get(results + i)).close();
        return loss;
    }

    float evaluate(Map<String, OnnxTensor> batch) throws OrtException {
        OrtSession.Result outputs = run(evaluation, batch);
        float loss = checkedLoss(outputs, outputs.size());
        outputs.close();
        return loss;
    }

    /** The outputs of the inference model, which reads the weights that were saved, for the first sample. */
    FloatBuffer answer(Map<String, OnnxTensor> batch) throws OrtException {
        try (OrtSession session = open("inference_model.onnx"); OrtSession.Result outputs = run(session, batch)) {
            OnnxTensor first = (OnnxTensor) outputs.get(0);
            FloatBuffer numbers = first.getFloatBuffer(); // a copy
            return numbers.limit(numbers.limit() / (int) first.getInfo().getShape()[0]);
        }
    }

    /** Writes all of the state or nothing: what was there stays until the new content is on the disk. */
    void save() throws IOException, GeneralSecurityException {
        for (Input input : inputs)
            if (input.offset > 0) values.get(input.name).getByteBuffer().get(file, input.offset, input.size);
        System.arraycopy(checksum(), 0, file, file.length - 32, 32);
        Path temporary = folder.resolve("state.tmp");
        Files.write(temporary, file, StandardOpenOption.CREATE, StandardOpenOption.WRITE,
                StandardOpenOption.TRUNCATE_EXISTING, StandardOpenOption.DSYNC);
        Files.move(temporary, folder.resolve("state.bin"), StandardCopyOption.ATOMIC_MOVE);
    }

    public void close() throws OrtException {
        for (OnnxTensor value : values.values()) value.close();
        step.close();
        evaluation.close();
    }

    private OrtSession open(String name) throws OrtException {
        OrtSession.SessionOptions options = new OrtSession.SessionOptions();
        options.setIntraOpNumThreads(1); // more pay only for large models
        return OrtEnvironment.getEnvironment().createSession(folder.resolve(name).toString(), options);
    }

    /** Runs a model on what it takes of the batch and the state. */
    private OrtSession.Result run(OrtSession session, Map<String, OnnxTensor> batch) throws OrtException {
        Map<String, OnnxTensor> taken = new HashMap<>(values);
        taken.putAll(batch);
        taken.keySet().retainAll(session.getInputNames());
        return session.run(taken);
    }

    /** The loss; or an error that says what is wrong with the batch, and nothing has changed. */
    private float checkedLoss(OrtSession.Result outputs, int results) throws OrtException {
        LongBuffer problem = ((OnnxTensor) outputs.get(results - 1)).getLongBuffer(); // a line of `onward.problems`, a number
        if (problem.get(0) == 0) return ((OnnxTensor) outputs.get(0)).getFloatBuffer().get(0);
        outputs.close();
        throw new IllegalArgumentException(about.get("onward.problems").split("\n")[(int) problem.get(0) - 1] + problem.get(1));
    }

    private Input only(String role) {
        return inputs.stream().filter(input -> input.role.equals(role)).findFirst().orElseThrow();
    }

    private byte[] checksum() throws GeneralSecurityException {
        MessageDigest digest = MessageDigest.getInstance("SHA-256");
        digest.update(file, 0, file.length - 32);
        return digest.digest();
    }
}
