// Trains with github.com/yalue/onnxruntime_go, over the files that `onward artifacts MODEL --portable` writes. Lift this
// file out; main.go shows how to use it. It goes on from state.bin in the folder. Errors are panics of `failure`.

package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	ort "github.com/yalue/onnxruntime_go"
)

// failure is what can go wrong in use: other panics are mistakes of the program.
type failure struct{ error }

func check(err error) {
	if err != nil {
		panic(failure{err})
	}
}

func must[T any](value T, err error) T {
	check(err)
	return value
}

// Input is a line of the table `onward.inputs`: what an input is, where it begins in the state file, its bytes, type and shape.
type Input struct {
	name, role   string
	offset, size int
	kind         ort.TensorElementDataType
	dims         ort.Shape
}

// Tensor lies over these bytes: as many samples as they are, where the first axis is free.
func (in Input) Tensor(content []byte) ort.Value {
	shape := append(ort.Shape{}, in.dims...)
	if shape[0] < 0 {
		shape[0] = int64(len(content) / in.size)
	}
	return must(ort.NewCustomDataTensor(shape, content, in.kind))
}

// Values are tensors by name: a batch has one for each input of the model and for the labels.
type Values map[string]ort.Value

type model struct {
	*ort.DynamicAdvancedSession
	inputs, outputs []string
}

// Trainer is a model's state and its steps. It has the state twice: a step reads one and writes the other.
type Trainer struct {
	Inputs           []Input // of the step, in its order: batch, learning rate, state, sums of gradients
	folder           string
	step, evaluation model
	about            map[string]string
	file, nextFile   []byte // the state file, with the tensors of the state over it
	values, next     Values
	rate             []byte
	steps            int // where the count of steps begins in the file
}

// Open opens the artifacts of a folder, with the step train_step, or accumulate_step for updates of several batches.
func Open(folder, step string) *Trainer {
	t := &Trainer{folder: folder, values: Values{}, next: Values{}}
	t.step, t.evaluation = t.open(step), t.open("eval_step")
	check(json.Unmarshal(must(os.ReadFile(filepath.Join(folder, step+".json"))), &t.about))
	if t.about["onward.portable"] != "2" {
		check(fmt.Errorf("this is not a portable step of version 2"))
	}
	path := filepath.Join(folder, "state.bin")
	t.file = must(os.ReadFile(path))
	if end := len(t.file) - 32; end < 64 || !bytes.Equal(t.checksum(), t.file[end:]) {
		check(fmt.Errorf("'%s' is damaged: its content does not match its checksum", path))
	}
	if fmt.Sprintf("%x", t.file[32:64]) != t.about["onward.state_digest"] {
		check(fmt.Errorf("'%s' is the state of another model", path))
	}
	t.nextFile = append([]byte{}, t.file...)
	lines := strings.Split(t.about["onward.inputs"], "\n")
	for i, name := range t.step.inputs {
		words := strings.Fields(lines[i])
		in := Input{name, words[0], integer(words[1]), integer(words[2]), ort.TensorElementDataType(integer(words[3])), nil}
		for _, dim := range words[4:] {
			in.dims = append(in.dims, int64(integer(dim)))
		}
		t.Inputs = append(t.Inputs, in)
		one, other := make([]byte, in.size), make([]byte, in.size)
		switch in.role {
		case "rate":
			t.rate, other = one, one
		case "steps":
			t.steps = in.offset
		}
		if in.offset > 0 {
			one, other = t.file[in.offset:in.offset+in.size], t.nextFile[in.offset:in.offset+in.size]
		}
		if in.role != "batch" {
			t.values[name], t.next[name] = in.Tensor(one), in.Tensor(other)
		}
	}
	return t
}

// Steps is how many batches this state has seen.
func (t *Trainer) Steps() int { return int(binary.LittleEndian.Uint64(t.file[t.steps:])) }

// Train trains on a batch and returns its loss. A trainer that accumulates multiplies the sum of the gradients by `update`,
// 1/4 after four batches, say, and updates by it, where `update` is not 0; any other updates by each batch.
func (t *Trainer) Train(batch Values, rate, update float32) float32 {
	var numbers bytes.Buffer
	check(binary.Write(&numbers, binary.LittleEndian, []float32{rate, update}))
	// the first alone, where it does not accumulate
	copy(t.rate, numbers.Bytes())
	// what the runtime makes, then the other copy of the state
	outputs := make([]ort.Value, integer(t.about["onward.results"]))
	results := len(outputs)
	for _, in := range t.Inputs[len(t.Inputs)+results-len(t.step.outputs):] { // frozen tensors come first and stay
		outputs = append(outputs, t.next[in.name])
	}
	loss := t.loss(t.step, batch, outputs, results)
	t.file, t.nextFile, t.values, t.next = t.nextFile, t.file, t.next, t.values
	return loss
}

// Evaluate returns the loss of a batch.
func (t *Trainer) Evaluate(batch Values) float32 {
	return t.loss(t.evaluation, batch, make([]ort.Value, len(t.evaluation.outputs)), len(t.evaluation.outputs))
}

// Answer returns the outputs of the inference model, which reads the weights that were saved, for the first sample.
func (t *Trainer) Answer(batch Values) []float32 {
	inference := t.open("inference_model")
	defer inference.Destroy()
	outputs := make([]ort.Value, len(inference.outputs))
	t.run(inference, batch, outputs)
	defer destroy(outputs)
	numbers := outputs[0].(*ort.Tensor[float32]).GetData()
	return append([]float32{}, numbers[:len(numbers)/int(outputs[0].GetShape()[0])]...)
}

// Save writes all of the state or nothing: what was there stays until the new content is on the disk.
func (t *Trainer) Save() {
	copy(t.file[len(t.file)-32:], t.checksum())
	path := filepath.Join(t.folder, "state.bin")
	file := must(os.Create(path + ".tmp"))
	must(file.Write(t.file))
	check(file.Sync())
	check(file.Close())
	check(os.Rename(path+".tmp", path))
}

func (t *Trainer) open(name string) (m model) {
	path := filepath.Join(t.folder, name+".onnx")
	inputs, outputs, err := ort.GetInputOutputInfo(path)
	check(err)
	for _, info := range inputs {
		m.inputs = append(m.inputs, info.Name)
	}
	for _, info := range outputs {
		m.outputs = append(m.outputs, info.Name)
	}
	options := must(ort.NewSessionOptions())
	defer options.Destroy()
	check(options.SetIntraOpNumThreads(1)) // more pay only for large models
	m.DynamicAdvancedSession = must(ort.NewDynamicAdvancedSession(path, m.inputs, m.outputs, options))
	return m
}

// run runs a model on what it takes of the batch and the state.
func (t *Trainer) run(m model, batch Values, outputs []ort.Value) {
	var inputs []ort.Value
	for _, name := range m.inputs {
		value, ok := batch[name]
		if !ok {
			value = t.values[name]
		}
		inputs = append(inputs, value)
	}
	check(m.Run(inputs, outputs))
}

// loss runs a step; it fails with what is wrong with the batch, and then nothing has changed.
func (t *Trainer) loss(m model, batch Values, outputs []ort.Value, results int) float32 {
	t.run(m, batch, outputs)
	defer destroy(outputs[:results])
	problem := outputs[results-1].(*ort.Tensor[int64]).GetData() // a line of `onward.problems`, and a number
	if problem[0] != 0 {
		check(fmt.Errorf("%s%d", strings.Split(t.about["onward.problems"], "\n")[problem[0]-1], problem[1]))
	}
	return outputs[0].(*ort.Tensor[float32]).GetData()[0]
}

func (t *Trainer) checksum() []byte {
	sum := sha256.Sum256(t.file[:len(t.file)-32])
	return sum[:]
}

func destroy(values []ort.Value) {
	for _, value := range values {
		check(value.Destroy())
	}
}

func integer(text string) int { return must(strconv.Atoi(text)) }
