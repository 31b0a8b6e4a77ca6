import ai.onnxruntime.OnnxTensor

/**
 * Batches of `count` samples from files, or an app's assets: whatever `open` reads. Each input of the model has one, NAME.bin,
 * with its samples one after another, little-endian.
 */
class Batches(private val trainer: Trainer, private val count: Int, private val open: (String) -> ByteArray) {
    private val contents = HashMap<String, ByteArray>()

    fun read(number: Long): Map<String, OnnxTensor> = trainer.inputs.filter { it.role == "batch" }.associate { input ->
        val name = "${input.name}.bin"
        val content = contents.getOrPut(name) { open(name) }
        val size = if (input.info.shape[0] < 0) input.size * count else input.size
        check(content.size % input.size == 0 && content.size >= size) {
            "'$name' has ${content.size} bytes, not $size or more in samples of ${input.size}"
        }
        input.name to input.tensor(content, (number % (content.size / size)).toInt() * size, size)
    }
}
