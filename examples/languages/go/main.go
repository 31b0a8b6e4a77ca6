// train ARTIFACTS DATA [updates] [batch size] [learning rate] [batches an update]
//
// DATA has a file for each input of the batch, NAME.bin: its samples one after another, little-endian. The program goes on
// from ARTIFACTS/state.bin, trains, evaluates, saves, and answers for one sample with the inference model. The
// variable ONNXRUNTIME is the path of onnxruntime's shared library.

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	ort "github.com/yalue/onnxruntime_go"
)

var files = map[string][]byte{}

func readBatch(t *Trainer, folder string, number, count int) Values {
	batch := Values{}
	for _, in := range t.Inputs {
		if in.role != "batch" {
			continue
		}
		name := in.name + ".bin"
		if _, ok := files[name]; !ok {
			files[name] = must(os.ReadFile(filepath.Join(folder, name)))
		}
		content, size := files[name], in.size
		if in.dims[0] < 0 {
			size *= count
		}
		if len(content)%in.size != 0 || len(content) < size {
			check(fmt.Errorf("'%s' has %d bytes, not %d or more in samples of %d", name, len(content), size, in.size))
		}
		first := number % (len(content) / size) * size
		batch[in.name] = in.Tensor(content[first : first+size])
	}
	return batch
}

func main() {
	defer func() {
		if problem, ok := recover().(failure); ok {
			fmt.Fprintln(os.Stderr, "error:", problem)
			os.Exit(1)
		}
	}()
	words := append(os.Args[1:], []string{"", "", "100", "32", "1e-3", "1"}[len(os.Args)-1:]...)
	updates, count, parts := integer(words[2]), integer(words[3]), integer(words[5])
	rate := must(strconv.ParseFloat(words[4], 32))
	ort.SetSharedLibraryPath(os.Getenv("ONNXRUNTIME"))
	check(ort.InitializeEnvironment())
	step := "train_step"
	if parts > 1 {
		step = "accumulate_step"
	}
	t := Open(words[0], step)
	for i := 0; i < updates*parts; i++ {
		batch := readBatch(t, words[1], t.Steps(), count)
		update := float32(0)
		if i%parts == parts-1 {
			update = 1 / float32(parts)
		}
		fmt.Printf("loss %.9g\n", t.Train(batch, float32(rate), update))
		for _, value := range batch {
			check(value.Destroy())
		}
	}
	batch := readBatch(t, words[1], 0, count)
	fmt.Printf("evaluation %.9g\n", t.Evaluate(batch))
	t.Save()
	fmt.Print("answer")
	for _, value := range t.Answer(batch) {
		fmt.Printf(" %.9g", value)
	}
	fmt.Println()
}
