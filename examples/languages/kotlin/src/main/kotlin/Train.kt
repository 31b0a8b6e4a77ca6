// gradle run --args="ARTIFACTS DATA [updates] [batch size] [learning rate] [batches an update]"
//
// DATA has a file for each input of the batch, NAME.bin: its samples one after another, little-endian. The program goes
// on from ARTIFACTS/state.bin, trains, evaluates, saves, and answers for one sample with the inference model.

import java.io.File
import kotlin.system.exitProcess

fun main(words: Array<String>) {
    val (artifacts, data) = words
    fun word(at: Int, otherwise: String) = words.getOrElse(at) { otherwise }
    val updates = word(2, "100").toInt()
    val size = word(3, "32").toInt()
    val rate = word(4, "1e-3").toFloat()
    val parts = word(5, "1").toInt()
    try {
        Trainer(File(artifacts), accumulates = parts > 1).use { trainer ->
            val batches = Batches(trainer, size) { File(data, it).readBytes() }
            for (i in 0 until updates * parts) {
                val batch = batches.read(trainer.steps)
                val update = if (i % parts == parts - 1) 1f / parts else 0f
                println("loss ${trainer.train(batch, rate, update)}")
                batch.values.forEach { it.close() }
            }
            val batch = batches.read(0)
            println("evaluation ${trainer.evaluate(batch)}")
            trainer.save()
            println("answer ${trainer.answer(batch).joinToString(" ")}")
        }
    } catch (error: Exception) {
        System.err.println("error: ${error.message}")
        exitProcess(1)
    }
}
