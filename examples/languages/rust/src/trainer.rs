//! Trains with the crates ort and sha2, over the files that `onward artifacts MODEL --portable` writes. Lift this file out;
//! main.rs shows how to use it. It goes on from state.bin in the folder.

use ort::session::{Session, SessionInputValue};
use ort::value::{DynValue, Tensor};
use sha2::{Digest, Sha256};
use std::borrow::Cow;
use std::collections::HashMap;
use std::error::Error;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

pub type Outcome<T> = Result<T, Box<dyn Error>>;
/// Tensors by name: a batch has one for each input of the model and for the labels.
pub type Values = HashMap<String, DynValue>;

/// A line of the table `onward.inputs`: what an input is, where it begins in a state file, its bytes, type and shape.
pub struct Input {
    pub name: String,
    pub role: String,
    offset: usize,
    pub size: usize,
    kind: usize,
    pub dims: Vec<i64>,
}

impl Input {
    fn parse(name: String, line: &str) -> Outcome<Self> {
        let (role, numbers) = line.split_once(' ').ok_or("the table of inputs is damaged")?;
        let numbers = numbers.split(' ').map(str::parse).collect::<Result<Vec<i64>, _>>()?;
        let (offset, size, kind) = (numbers[0] as usize, numbers[1] as usize, numbers[2] as usize);
        Ok(Input { name, role: role.into(), offset, size, kind, dims: numbers[3..].into() })
    }

    /// A tensor of these bytes: of as many samples as they are, where the first axis is free.
    pub fn tensor(&self, content: &[u8]) -> Outcome<DynValue> {
        let samples = (content.len() / self.size) as i64;
        let shape: Vec<i64> = self.dims.iter().map(|&dim| if dim < 0 { samples } else { dim }).collect();
        Ok(match self.kind { // as ONNX numbers the types
            1 => Tensor::from_array((shape, numbers(content, f32::from_le_bytes)))?.into_dyn(),
            2 => Tensor::from_array((shape, content.to_vec()))?.into_dyn(),
            6 => Tensor::from_array((shape, numbers(content, i32::from_le_bytes)))?.into_dyn(),
            7 => Tensor::from_array((shape, numbers(content, i64::from_le_bytes)))?.into_dyn(),
            other => return Err(format!("'{}': tensors of type {other} need a line here", self.name).into()),
        })
    }
}

fn numbers<T, const SIZE: usize>(content: &[u8], number: fn([u8; SIZE]) -> T) -> Vec<T> {
    content.chunks_exact(SIZE).map(|part| number(part.try_into().unwrap())).collect()
}

/// A model's state and its steps.
pub struct Trainer {
    /// Of the step, in its order: batch, learning rate, state, sums of gradients.
    pub inputs: Vec<Input>,
    values: Values, // all but the batch
    folder: PathBuf,
    step: Session,
    evaluation: Session,
    about: HashMap<&'static str, String>,
    file: Vec<u8>,
}

impl Trainer {
    /// Opens the artifacts of a folder. With `accumulates`, several batches can make one update.
    pub fn open(folder: &Path, accumulates: bool) -> Outcome<Self> {
        let step = session(folder, if accumulates { "accumulate_step.onnx" } else { "train_step.onnx" })?;
        let mut about = HashMap::new();
        for key in ["portable", "state_digest", "inputs", "results", "problems"] {
            about.insert(key, step.metadata()?.custom(&format!("onward.{key}")).unwrap_or_default());
        }
        if about["portable"] != "2" {
            return Err("this is not a portable step of version 2".into());
        }
        let path = folder.join("state.bin");
        let file = fs::read(&path).map_err(|error| format!("{path:?} cannot be read: {error}"))?;
        let end = file.len().saturating_sub(32);
        if end < 64 || Sha256::digest(&file[..end])[..] != file[end..] {
            return Err(format!("{path:?} is damaged: its content does not match its checksum").into());
        }
        if file[32..64].iter().map(|byte| format!("{byte:02x}")).collect::<String>() != about["state_digest"] {
            return Err(format!("{path:?} is the state of another model").into());
        }
        let lines = step.inputs.iter().zip(about["inputs"].lines());
        let inputs = lines.map(|(input, line)| Input::parse(input.name.clone(), line)).collect::<Outcome<Vec<_>>>()?;
        let mut values = Values::new();
        for input in inputs.iter().filter(|input| input.role != "batch") {
            let zeros = vec![0; input.size];
            let content = if input.offset > 0 { &file[input.offset..][..input.size] } else { &zeros };
            values.insert(input.name.clone(), input.tensor(content)?);
        }
        Ok(Trainer { inputs, values, folder: folder.into(), step, evaluation: session(folder, "eval_step.onnx")?, about, file })
    }

    /// How many batches this state has seen.
    pub fn steps(&self) -> Outcome<usize> {
        Ok(self.values[&self.only("steps").name].try_extract_tensor::<i64>()?.1[0] as usize)
    }

    /// Trains on a batch and returns its loss. A trainer that accumulates multiplies the sum of the gradients by `update`,
    /// 1/4 after four batches, say, and updates by it, where `update` is not 0; any other updates by each batch.
    pub fn train(&mut self, batch: &Values, rate: f32, update: f32) -> Outcome<f32> {
        let input = self.only("rate"); // has one number, where it does not accumulate
        let numbers = vec![rate, update][..input.size / 4].to_vec();
        self.values.insert(input.name.clone(), Tensor::from_array((input.dims.clone(), numbers))?.into_dyn());
        let mut outputs = run(&mut self.step, batch, &self.values)?;
        let next = outputs.split_off(self.about["results"].parse()?);
        let loss = self.checked_loss(&outputs)?;
        let first = self.inputs.len() - next.len(); // frozen tensors come first and stay
        for (input, value) in self.inputs[first..].iter().zip(next) {
            self.values.insert(input.name.clone(), value);
        }
        Ok(loss)
    }

    pub fn evaluate(&mut self, batch: &Values) -> Outcome<f32> {
        let outputs = run(&mut self.evaluation, batch, &self.values)?;
        self.checked_loss(&outputs)
    }

    /// The outputs of the inference model, which reads the weights that were saved, for the first sample.
    pub fn answer(&self, batch: &Values) -> Outcome<Vec<f32>> {
        let outputs = run(&mut session(&self.folder, "inference_model.onnx")?, batch, &self.values)?;
        let (shape, numbers) = outputs[0].try_extract_tensor::<f32>()?;
        Ok(numbers[..numbers.len() / shape[0] as usize].to_vec())
    }

    /// Writes all of the state or nothing: what was there stays until the new content is on the disk.
    pub fn save(&mut self) -> Outcome<()> {
        for input in self.inputs.iter().filter(|input| input.offset > 0) {
            let value = &self.values[&input.name];
            let content: Vec<u8> = match input.kind {
                1 => value.try_extract_tensor::<f32>()?.1.iter().flat_map(|number| number.to_le_bytes()).collect(),
                7 => value.try_extract_tensor::<i64>()?.1.iter().flat_map(|number| number.to_le_bytes()).collect(),
                _ => continue, // tensors of other types are frozen
            };
            self.file[input.offset..][..input.size].copy_from_slice(&content);
        }
        let end = self.file.len() - 32;
        let sum = Sha256::digest(&self.file[..end]);
        self.file[end..].copy_from_slice(&sum);
        let mut file = File::create(self.folder.join("state.tmp"))?;
        file.write_all(&self.file)?;
        file.sync_all()?;
        Ok(fs::rename(self.folder.join("state.tmp"), self.folder.join("state.bin"))?)
    }

    fn only(&self, role: &str) -> &Input {
        self.inputs.iter().find(|input| input.role == role).expect("the table of inputs lacks a role")
    }

    /// The loss; or an error that says what is wrong with the batch, and nothing has changed.
    fn checked_loss(&self, results: &[DynValue]) -> Outcome<f32> {
        let problem = results[results.len() - 1].try_extract_tensor::<i64>()?.1; // a line of `onward.problems`, and a number
        match self.about["problems"].lines().nth((problem[0] - 1) as usize) {
            Some(line) => Err(format!("{line}{}", problem[1]).into()),
            None => Ok(results[0].try_extract_tensor::<f32>()?.1[0]),
        }
    }
}

fn session(folder: &Path, name: &str) -> Outcome<Session> {
    Ok(Session::builder()?.with_intra_threads(1)?.commit_from_file(folder.join(name))?) // more pay only for large models
}

/// Runs a model on what it takes of the batch and the state; its outputs in their order.
fn run(model: &mut Session, batch: &Values, state: &Values) -> Outcome<Vec<DynValue>> {
    let mut inputs: Vec<(Cow<str>, SessionInputValue)> = Vec::new();
    for input in &model.inputs {
        let value = batch.get(&input.name).or_else(|| state.get(&input.name)).ok_or("the batch lacks an input")?;
        inputs.push((input.name.clone().into(), value.into()));
    }
    let names: Vec<String> = model.outputs.iter().map(|output| output.name.clone()).collect();
    let mut outputs = model.run(inputs)?;
    Ok(names.iter().map(|name| outputs.remove(name).ok_or("an output is missing")).collect::<Result<_, _>>()?)
}
