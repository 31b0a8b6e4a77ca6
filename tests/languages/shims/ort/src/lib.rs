//! Stands in for the crate ort: the part of it that the program uses, over the same C API.

use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::{fmt, ptr};

extern "C" {
    fn rt_start() -> *mut c_char;
    fn rt_open(path: *const c_char, session: *mut *mut c_void) -> *mut c_char;
    fn rt_close(session: *mut c_void);
    fn rt_inputs(session: *mut c_void) -> usize;
    fn rt_outputs(session: *mut c_void) -> usize;
    fn rt_name(session: *mut c_void, output: c_int, index: usize) -> *mut c_char;
    fn rt_info(session: *mut c_void, output: c_int, index: usize, kind: *mut c_int, rank: *mut usize, dims: *mut i64) -> *mut c_char;
    fn rt_metadata(session: *mut c_void, key: *const c_char) -> *mut c_char;
    fn rt_tensor(data: *mut c_void, size: usize, dims: *const i64, rank: usize, kind: c_int, value: *mut *mut c_void) -> *mut c_char;
    fn rt_value(value: *mut c_void, data: *mut *mut c_void, count: *mut usize, kind: *mut c_int, rank: *mut usize, dims: *mut i64) -> *mut c_char;
    fn rt_release(value: *mut c_void);
    fn rt_run(
        session: *mut c_void, input: *const *const c_char, inputs: *const *mut c_void, ins: usize,
        output: *const *const c_char, outputs: *mut *mut c_void, outs: usize,
    ) -> *mut c_char;
    fn free(pointer: *mut c_void);
}

#[derive(Debug)]
pub struct Error(String);

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for Error {}

pub type Result<T> = std::result::Result<T, Error>;

fn take(text: *mut c_char) -> String {
    let own = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
    unsafe { free(text.cast()) };
    own
}

fn check(message: *mut c_char) -> Result<()> {
    if message.is_null() { Ok(()) } else { Err(Error(take(message))) }
}

pub mod tensor {
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum TensorElementType { Float32 = 1, Int32 = 6, Int64 = 7, Other = 0 }

    #[derive(Clone, Debug)]
    pub struct Shape(pub(crate) Vec<i64>);

    impl std::ops::Deref for Shape {
        type Target = [i64];
        fn deref(&self) -> &[i64] { &self.0 }
    }
}

pub mod value {
    use super::{check, ptr, rt_release, rt_tensor, rt_value, tensor::{Shape, TensorElementType}, Error, Result};
    use std::{any::Any, ffi::c_void, marker::PhantomData};

    pub enum ValueType { Tensor { ty: TensorElementType, shape: Shape } }

    pub struct DynValue { pub(crate) handle: *mut c_void, #[allow(dead_code)] pub(crate) memory: Option<Box<dyn Any>> }

    pub struct Tensor<T> { value: DynValue, kind: PhantomData<T> }

    pub trait Element: Copy + 'static { const KIND: i32; }
    impl Element for f32 { const KIND: i32 = 1; }
    impl Element for u8 { const KIND: i32 = 2; }
    impl Element for i32 { const KIND: i32 = 6; }
    impl Element for i64 { const KIND: i32 = 7; }

    impl<T: Element> Tensor<T> {
        pub fn from_array((shape, data): (Vec<i64>, Vec<T>)) -> Result<Self> {
            let (mut data, mut handle) = (Box::new(data), ptr::null_mut());
            let size = std::mem::size_of_val(data.as_slice());
            check(unsafe { rt_tensor(data.as_mut_ptr().cast(), size, shape.as_ptr(), shape.len(), T::KIND, &mut handle) })?;
            Ok(Tensor { value: DynValue { handle, memory: Some(data) }, kind: PhantomData })
        }
        pub fn into_dyn(self) -> DynValue { self.value }
    }

    impl DynValue {
        pub fn try_extract_tensor<T: Element>(&self) -> Result<(Shape, &[T])> {
            let (mut data, mut count, mut kind, mut rank, mut dims) = (ptr::null_mut(), 0, 0, 0, [0; 16]);
            check(unsafe { rt_value(self.handle, &mut data, &mut count, &mut kind, &mut rank, dims.as_mut_ptr()) })?;
            if kind != T::KIND { return Err(Error("the tensor has another type".into())); }
            Ok((Shape(dims[..rank].to_vec()), unsafe { std::slice::from_raw_parts(data.cast(), count) }))
        }
    }

    impl Drop for DynValue {
        fn drop(&mut self) { unsafe { rt_release(self.handle) } }
    }
}

pub mod session {
    use super::*;
    use std::{borrow::Cow, path::Path};
    use tensor::{Shape, TensorElementType};
    use value::{DynValue, ValueType};

    pub struct Input { pub name: String, pub input_type: ValueType }
    pub struct Output { pub name: String }
    pub struct Session { handle: *mut c_void, pub inputs: Vec<Input>, pub outputs: Vec<Output> }
    pub struct SessionBuilder;
    pub struct ModelMetadata<'s>(&'s Session);
    pub struct SessionOutputs(Vec<(String, Option<DynValue>)>);
    pub struct SessionInputValue<'v>(&'v DynValue);

    impl<'v> From<&'v DynValue> for SessionInputValue<'v> {
        fn from(value: &'v DynValue) -> Self { SessionInputValue(value) }
    }

    impl SessionBuilder {
        pub fn with_intra_threads(self, _: usize) -> Result<Self> { Ok(self) }
        pub fn commit_from_file(self, path: impl AsRef<Path>) -> Result<Session> {
            check(unsafe { rt_start() })?;
            let name = CString::new(path.as_ref().to_string_lossy().as_bytes()).unwrap();
            let mut handle = ptr::null_mut();
            check(unsafe { rt_open(name.as_ptr(), &mut handle) })?;
            let mut session = Session { handle, inputs: Vec::new(), outputs: Vec::new() };
            for index in 0..unsafe { rt_inputs(handle) } {
                let (mut kind, mut rank, mut dims) = (0, 0, [0; 16]);
                check(unsafe { rt_info(handle, 0, index, &mut kind, &mut rank, dims.as_mut_ptr()) })?;
                let ty = match kind {
                    1 => TensorElementType::Float32,
                    6 => TensorElementType::Int32,
                    7 => TensorElementType::Int64,
                    _ => TensorElementType::Other,
                };
                let input_type = ValueType::Tensor { ty, shape: Shape(dims[..rank].to_vec()) };
                session.inputs.push(Input { name: take(unsafe { rt_name(handle, 0, index) }), input_type });
            }
            for index in 0..unsafe { rt_outputs(handle) } {
                session.outputs.push(Output { name: take(unsafe { rt_name(handle, 1, index) }) });
            }
            Ok(session)
        }
    }

    impl Session {
        pub fn builder() -> Result<SessionBuilder> { Ok(SessionBuilder) }
        pub fn metadata(&self) -> Result<ModelMetadata<'_>> { Ok(ModelMetadata(self)) }
        pub fn run(&mut self, inputs: Vec<(Cow<'_, str>, SessionInputValue<'_>)>) -> Result<SessionOutputs> {
            let names: Vec<CString> = inputs.iter().map(|(name, _)| CString::new(name.as_bytes()).unwrap()).collect();
            let outputs: Vec<CString> = self.outputs.iter().map(|output| CString::new(output.name.as_bytes()).unwrap()).collect();
            let input: Vec<*const c_char> = names.iter().map(|name| name.as_ptr()).collect();
            let output: Vec<*const c_char> = outputs.iter().map(|name| name.as_ptr()).collect();
            let values: Vec<*mut c_void> = inputs.iter().map(|(_, value)| value.0.handle).collect();
            let mut made = vec![ptr::null_mut(); outputs.len()];
            check(unsafe { rt_run(self.handle, input.as_ptr(), values.as_ptr(), values.len(), output.as_ptr(), made.as_mut_ptr(), made.len()) })?;
            let pair = |(output, handle): (&Output, _)| (output.name.clone(), Some(DynValue { handle, memory: None }));
            Ok(SessionOutputs(self.outputs.iter().zip(made).map(pair).collect()))
        }
    }

    impl Drop for Session {
        fn drop(&mut self) { unsafe { rt_close(self.handle) } }
    }

    impl ModelMetadata<'_> {
        pub fn custom(&self, key: &str) -> Option<String> {
            let key = CString::new(key).unwrap();
            let text = unsafe { rt_metadata(self.0.handle, key.as_ptr()) };
            if text.is_null() { None } else { Some(take(text)) }
        }
    }

    impl SessionOutputs {
        pub fn remove(&mut self, name: impl AsRef<str>) -> Option<DynValue> {
            self.0.iter_mut().find(|(own, _)| own == name.as_ref()).and_then(|(_, value)| value.take())
        }
    }
}
