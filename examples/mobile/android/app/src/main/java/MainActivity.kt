// Compiled against Android's classes, never run on a device. One button: each press trains 100 updates more, evaluates, saves,
// and answers for one sample.
package app.onward.training

import Batches
import Trainer
import android.app.Activity
import android.os.Bundle
import android.widget.Button
import android.widget.LinearLayout
import android.widget.ScrollView
import android.widget.TextView
import java.io.File
import java.util.concurrent.Executors

class MainActivity : Activity() {
    private val worker = Executors.newSingleThreadExecutor() // a trainer belongs to one thread
    private lateinit var log: TextView

    override fun onCreate(savedInstanceState: Bundle?) {
        super.onCreate(savedInstanceState)
        log = TextView(this)
        val button = Button(this).apply { text = "Train"; setOnClickListener { worker.execute(::train) } }
        val column = LinearLayout(this).apply { orientation = LinearLayout.VERTICAL; addView(button); addView(log) }
        setContentView(ScrollView(this).apply { addView(column) })
    }

    override fun onDestroy() {
        worker.shutdown()
        super.onDestroy()
    }

    private fun train() {
        try {
            Trainer(models()).use { trainer ->
                say("resumed after ${trainer.steps} steps")
                val batches = Batches(trainer, BATCH) { name -> assets.open("data/$name").use { it.readBytes() } }
                repeat(100) { update ->
                    val batch = batches.read(trainer.steps)
                    val loss = trainer.train(batch, RATE)
                    if (update % 20 == 0) say("loss $loss")
                    batch.values.forEach { it.close() }
                }
                val batch = batches.read(0)
                say("evaluation ${trainer.evaluate(batch)}")
                trainer.save()
                say("saved; answer ${trainer.answer(batch).joinToString(" ") { "%.2f".format(it) }}")
                batch.values.forEach { it.close() }
            }
        } catch (error: Exception) {
            say("error: ${error.message}")
        }
    }

    /** The models and the state as files: the runtime opens paths, and the state changes. */
    private fun models(): File {
        val folder = File(filesDir, "models").apply { mkdirs() }
        for (name in assets.list("models").orEmpty()) {
            val target = File(folder, name)
            if (!target.exists()) assets.open("models/$name").use { from -> target.outputStream().use { from.copyTo(it) } }
        }
        return folder
    }

    private fun say(text: String) = runOnUiThread { log.append("$text\n") }

    private companion object {
        const val BATCH = 32
        const val RATE = 1e-3f
    }
}
