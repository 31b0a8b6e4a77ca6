import ai.onnxruntime.OnnxTensor
import ai.onnxruntime.OrtEnvironment
import ai.onnxruntime.OrtSession
import ai.onnxruntime.TensorInfo
import java.io.File
import java.io.FileOutputStream
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.file.Files
import java.nio.file.StandardCopyOption
import java.security.MessageDigest

/** An input of the step, from the table `onward.inputs`: what it is, where it begins in a state file, and its bytes. */
class Input(val name: String, val role: String, val offset: Int, val size: Int, val info: TensorInfo) {
    /** A tensor of some bytes: of as many samples as they are, where the first axis is free. */
    fun tensor(content: ByteArray, from: Int, bytes: Int): OnnxTensor {
        val shape = info.shape
        if (shape[0] < 0) shape[0] = bytes.toLong() / size
        val buffer = ByteBuffer.allocateDirect(bytes).order(ByteOrder.nativeOrder())
        buffer.put(content, from, bytes).rewind()
        return OnnxTensor.createTensor(OrtEnvironment.getEnvironment(), buffer, shape, info.type)
    }
}

/**
 * Trains with onnxruntime's Java binding, over the files that `onward artifacts MODEL --portable` or `onward mobile` writes.
 * Lift this file out; Train.kt shows how to use it. It goes on from state.bin in the folder. With `accumulates`,
 * several batches can make one update.
 */
class Trainer(private val folder: File, accumulates: Boolean = false) : AutoCloseable {
    private val env = OrtEnvironment.getEnvironment()
    private val step = open(if (accumulates) "accumulate_step" else "train_step")
    private val evaluation = open("eval_step")
    private val about: Map<String, String> = step.metadata.customMetadata
    private val results = about["onward.results"].orEmpty().toInt()
    private val path = File(folder, "state.bin")
    private val file: ByteArray
    private val values = LinkedHashMap<String, OnnxTensor>() // all but the batch

    /** What the step takes, in its order: the batch, the learning rate, the state, sums of gradients. */
    val inputs: List<Input>

    init {
        check(about["onward.portable"] == "2") { "this is not a portable step of version 2" }
        file = path.readBytes()
        check(file.size >= 96 && checksum().contentEquals(file.copyOfRange(file.size - 32, file.size))) {
            "'$path' is damaged: its content does not match its checksum"
        }
        val digest = file.slice(32 until 64).joinToString("") { "%02x".format(it) }
        check(digest == about["onward.state_digest"]) { "'$path' is the state of another model" }
        inputs = step.inputNames.zip(about.getValue("onward.inputs").lines()) { name, line ->
            val (role, offset, size) = line.split(" ")
            Input(name, role, offset.toInt(), size.toInt(), step.inputInfo.getValue(name).info as TensorInfo)
        }
        for (input in inputs.filter { it.role != "batch" }) {
            values[input.name] = input.tensor(if (input.offset > 0) file else ByteArray(input.size), input.offset, input.size)
        }
    }

    /** How many batches this state has seen. */
    val steps: Long get() = values.getValue(inputs.first { it.role == "steps" }.name).longBuffer[0]

    /**
     * Trains on a batch and returns its loss. A trainer that accumulates multiplies the sum of the gradients by `update`,
     * 1/4 after four batches, say, and updates by it, where `update` is not 0; any other updates by each batch.
     */
    fun train(batch: Map<String, OnnxTensor>, rate: Float, update: Float = 1f): Float {
        val input = inputs.first { it.role == "rate" } // has one number, where it does not accumulate
        values.put(input.name, OnnxTensor.createTensor(env, floatArrayOf(rate, update).copyOf(input.size / 4)))?.close()
        val outputs = run(step, batch)
        val loss = checkedLoss(outputs, results)
        for (i in 0 until results) outputs[i].close()
        val changing = inputs.takeLast(outputs.size() - results) // frozen tensors come first and stay
        changing.forEachIndexed { i, input -> values.put(input.name, outputs[results + i] as OnnxTensor)?.close() }
        return loss
    }

    fun evaluate(batch: Map<String, OnnxTensor>): Float =
        run(evaluation, batch).let { outputs -> checkedLoss(outputs, outputs.size()).also { outputs.close() } }

    /**
     * The outputs of the inference model for the first sample. That model reads the weights that were saved; as an .ort file
     * it takes them.
     */
    fun answer(batch: Map<String, OnnxTensor>): FloatArray = open("inference_model").use { session ->
        run(session, batch).use { outputs ->
            val first = outputs[0] as OnnxTensor
            FloatArray(first.floatBuffer.remaining() / first.info.shape[0].toInt()).also { first.floatBuffer.get(it) }
        }
    }

    /** Writes all of the state or nothing: what was there stays until the new content is on the disk. */
    fun save() {
        for (input in inputs.filter { it.offset > 0 }) values.getValue(input.name).byteBuffer.get(file, input.offset, input.size)
        checksum().copyInto(file, file.size - 32)
        val temporary = File("$path.tmp")
        FileOutputStream(temporary).use { it.write(file); it.fd.sync() }
        Files.move(temporary.toPath(), path.toPath(), StandardCopyOption.ATOMIC_MOVE)
    }

    override fun close() {
        values.values.forEach { it.close() }
        step.close()
        evaluation.close()
    }

    private fun open(name: String): OrtSession {
        val options = OrtSession.SessionOptions().apply { setIntraOpNumThreads(1) } // more pay only for large models
        val path = File(folder, "$name.onnx").takeIf { it.exists() } ?: File(folder, "$name.ort")
        return env.createSession(path.path, options)
    }

    /** Runs a model on what it takes of the batch and the state. */
    private fun run(session: OrtSession, batch: Map<String, OnnxTensor>): OrtSession.Result =
        session.run((values + batch).filterKeys { it in session.inputNames })

    /** The loss; or an error that says what is wrong with the batch, and nothing has changed. */
    private fun checkedLoss(outputs: OrtSession.Result, results: Int): Float {
        val problem = (outputs[results - 1] as OnnxTensor).longBuffer // a line of `onward.problems`, and a number
        if (problem[0] == 0L) return (outputs[0] as OnnxTensor).floatBuffer[0]
        outputs.close()
        throw IllegalArgumentException(about.getValue("onward.problems").lines()[problem[0].toInt() - 1] + problem[1])
    }

    private fun checksum(): ByteArray = MessageDigest.getInstance("SHA-256").run { update(file, 0, file.size - 32); digest() }
}
