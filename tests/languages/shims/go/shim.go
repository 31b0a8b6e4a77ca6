// Package onnxruntime_go stands in for github.com/yalue/onnxruntime_go: the part of it that the program uses, over the
// same C API, and with its limits (an output that is made has a type that a Tensor can have, and axes).
package onnxruntime_go

/*
#include <stdlib.h>
#include "runtime.h"
*/
import "C"

import (
	"errors"
	"unsafe"
)

type TensorElementDataType int

const (
	TensorElementDataTypeFloat   TensorElementDataType = 1
	TensorElementDataTypeInt32   TensorElementDataType = 6
	TensorElementDataTypeInt64   TensorElementDataType = 7
	TensorElementDataTypeFloat16 TensorElementDataType = 10
	TensorElementDataTypeDouble  TensorElementDataType = 11
)

type Shape []int64

func NewShape(dimensions ...int64) Shape { return Shape(dimensions) }

func (s Shape) FlattenedSize() int64 {
	size := int64(1)
	for _, dim := range s {
		size *= dim
	}
	return size
}

type Value interface {
	Destroy() error
	GetShape() Shape
	handle() unsafe.Pointer
}

type base struct {
	value unsafe.Pointer
	shape Shape
}

func (b *base) GetShape() Shape        { return b.shape }
func (b *base) handle() unsafe.Pointer { return b.value }
func (b *base) Destroy() error {
	C.rt_release(b.value)
	return nil
}

// CustomDataTensor holds bytes of Go's: the garbage collector does not move them.
type CustomDataTensor struct {
	base
	data []byte
}

func (t *CustomDataTensor) GetData() []byte { return t.data }

type Tensor[T any] struct {
	base
	data []T
}

func (t *Tensor[T]) GetData() []T { return t.data }

func failed(message *C.char) error {
	if message == nil {
		return nil
	}
	defer C.free(unsafe.Pointer(message))
	return errors.New(C.GoString(message))
}

func NewCustomDataTensor(shape Shape, data []byte, kind TensorElementDataType) (*CustomDataTensor, error) {
	if len(shape) == 0 {
		return nil, errors.New("the shape has no dimensions")
	}
	tensor := &CustomDataTensor{base{shape: append(Shape(nil), shape...)}, data}
	var value unsafe.Pointer
	err := failed(C.rt_tensor(unsafe.Pointer(&data[0]), C.size_t(len(data)), (*C.int64_t)(&shape[0]), C.size_t(len(shape)), C.int(kind), &value))
	tensor.value = value
	return tensor, err
}

type InputOutputInfo struct {
	Name       string
	Dimensions Shape
	DataType   TensorElementDataType
}

func SetSharedLibraryPath(string) {}

func InitializeEnvironment() error { return failed(C.rt_start()) }

func open(path string) (session unsafe.Pointer, err error) {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	err = failed(C.rt_open(name, &session))
	return session, err
}

func GetInputOutputInfo(path string) (in, out []InputOutputInfo, err error) {
	session, err := open(path)
	if err != nil {
		return nil, nil, err
	}
	defer C.rt_close(session)
	read := func(output C.int, count C.size_t) (infos []InputOutputInfo) {
		for i := C.size_t(0); i < count; i++ {
			name := C.rt_name(session, output, i)
			defer C.free(unsafe.Pointer(name))
			var kind C.int
			var rank C.size_t
			var dims [16]C.int64_t
			failed(C.rt_info(session, output, i, &kind, &rank, &dims[0]))
			info := InputOutputInfo{Name: C.GoString(name), DataType: TensorElementDataType(kind)}
			for _, dim := range dims[:rank] {
				info.Dimensions = append(info.Dimensions, int64(dim))
			}
			infos = append(infos, info)
		}
		return infos
	}
	return read(0, C.rt_inputs(session)), read(1, C.rt_outputs(session)), nil
}

type SessionOptions struct{}

func NewSessionOptions() (*SessionOptions, error)        { return &SessionOptions{}, nil }
func (o *SessionOptions) SetIntraOpNumThreads(int) error { return nil }
func (o *SessionOptions) Destroy() error                 { return nil }

type DynamicAdvancedSession struct {
	session         unsafe.Pointer
	inputs, outputs []*C.char
}

func NewDynamicAdvancedSession(path string, in, out []string, options *SessionOptions) (*DynamicAdvancedSession, error) {
	session, err := open(path)
	made := &DynamicAdvancedSession{session: session}
	for _, name := range in {
		made.inputs = append(made.inputs, C.CString(name))
	}
	for _, name := range out {
		made.outputs = append(made.outputs, C.CString(name))
	}
	return made, err
}

func (s *DynamicAdvancedSession) Destroy() error {
	C.rt_close(s.session)
	for _, name := range append(s.inputs, s.outputs...) {
		C.free(unsafe.Pointer(name))
	}
	return nil
}

func (s *DynamicAdvancedSession) Run(inputs, outputs []Value) error {
	in, out := make([]unsafe.Pointer, len(inputs)), make([]unsafe.Pointer, len(outputs))
	for i, value := range inputs {
		in[i] = value.handle()
	}
	for i, value := range outputs {
		if value != nil {
			out[i] = value.handle()
		}
	}
	err := failed(C.rt_run(s.session, &s.inputs[0], &in[0], C.size_t(len(in)), &s.outputs[0], &out[0], C.size_t(len(out))))
	for i := range outputs {
		if err == nil && outputs[i] == nil {
			outputs[i], err = made(out[i])
		}
	}
	return err
}

func made(value unsafe.Pointer) (Value, error) {
	var data unsafe.Pointer
	var kind C.int
	var count, rank C.size_t
	var dims [16]C.int64_t
	if err := failed(C.rt_value(value, &data, &count, &kind, &rank, &dims[0])); err != nil {
		return nil, err
	}
	if rank == 0 {
		return nil, errors.New("shapes must have at least one dimension")
	}
	var shape Shape
	for _, dim := range dims[:rank] {
		shape = append(shape, int64(dim))
	}
	own := base{value: value, shape: shape}
	switch TensorElementDataType(kind) {
	case TensorElementDataTypeFloat:
		return &Tensor[float32]{own, unsafe.Slice((*float32)(data), int(count))}, nil
	case TensorElementDataTypeInt64:
		return &Tensor[int64]{own, unsafe.Slice((*int64)(data), int(count))}, nil
	}
	return nil, errors.New("the type of an output is not supported")
}
