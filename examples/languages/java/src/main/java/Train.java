import ai.onnxruntime.*;
import java.io.*;
import java.nio.*;
import java.nio.file.*;
import java.util.*;

/**
 * gradle run --args="ARTIFACTS DATA [updates] [batch size] [learning rate] [batches an update]"
 *
 * DATA has a file for each input of the batch, NAME.bin: its samples one after another, little-endian. The program goes on
 * from ARTIFACTS/state.bin, trains, evaluates, saves, and answers for one sample with the inference model.
 */
final class Train {
    private static final Map<String, byte[]> DATA = new HashMap<>();

    private static Map<String, OnnxTensor> readBatch(Trainer trainer, Path folder, long number, int count) throws OrtException, IOException {
        Map<String, OnnxTensor> batch = new HashMap<>();
        for (Trainer.Input input : trainer.inputs) {
            if (!input.role().equals("batch")) continue;
            String name = input.name() + ".bin";
            if (!DATA.containsKey(name)) DATA.put(name, Files.readAllBytes(folder.resolve(name)));
            byte[] content = DATA.get(name);
            int size = input.dims()[0] < 0 ? input.size() * count : input.size();
            if (content.length % input.size() != 0 || content.length < size)
                throw new IOException("'" + name + "' has " + content.length + " bytes, not " + size + " or more in samples of " + input.size());
            batch.put(input.name(), input.tensor(content, (int) (number % (content.length / size)) * size, size));
        }
        return batch;
    }

    public static void main(String[] words) {
        String[] options = {"", "", "100", "32", "1e-3", "1"};
        System.arraycopy(words, 0, options, 0, words.length);
        Path data = Path.of(options[1]);
        int updates = Integer.parseInt(options[2]), size = Integer.parseInt(options[3]), parts = Integer.parseInt(options[5]);
        float rate = Float.parseFloat(options[4]);
        try (Trainer trainer = new Trainer(Path.of(options[0]), parts > 1)) {
            for (int i = 0; i < updates * parts; i++) {
                Map<String, OnnxTensor> batch = readBatch(trainer, data, trainer.steps(), size);
                float update = i % parts == parts - 1 ? 1f / parts : 0;
                System.out.println("loss " + trainer.train(batch, rate, update));
                batch.values().forEach(OnnxTensor::close);
            }
            Map<String, OnnxTensor> batch = readBatch(trainer, data, 0, size);
            System.out.println("evaluation " + trainer.evaluate(batch));
            trainer.save();
            System.out.print("answer");
            for (FloatBuffer row = trainer.answer(batch); row.hasRemaining(); ) System.out.print(" " + row.get());
            System.out.println();
        } catch (Exception error) {
            System.err.println("error: " + error.getMessage());
            System.exit(1);
        }
    }
}
