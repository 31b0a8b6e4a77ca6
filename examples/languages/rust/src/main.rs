//! cargo run --release -- ARTIFACTS DATA [updates] [batch size] [learning rate] [batches an update]
//!
//! DATA has a file for each input of the batch, NAME.bin: its samples one after another, little-endian. The program goes
//! on from ARTIFACTS/state.bin, trains, evaluates, saves, and answers for one sample with the inference model.

mod trainer;

use std::collections::HashMap;
use std::path::Path;
use trainer::{Outcome, Trainer, Values};

fn read_batch(
    trainer: &Trainer, files: &mut HashMap<String, Vec<u8>>, folder: &Path, number: usize, count: usize,
) -> Outcome<Values> {
    let mut batch = Values::new();
    for input in trainer.inputs.iter().filter(|input| input.role == "batch") {
        let name = format!("{}.bin", input.name);
        if !files.contains_key(&name) {
            files.insert(name.clone(), std::fs::read(folder.join(&name)).map_err(|error| format!("'{name}': {error}"))?);
        }
        let (content, size) = (&files[&name], if input.dims[0] < 0 { input.size * count } else { input.size });
        if content.len() % input.size != 0 || content.len() < size {
            return Err(format!("'{name}' has {} bytes, not {size} or more in samples of {}", content.len(), input.size).into());
        }
        let first = number % (content.len() / size) * size;
        batch.insert(input.name.clone(), input.tensor(&content[first..first + size])?);
    }
    Ok(batch)
}

fn train(words: &[String]) -> Outcome<()> {
    let word = |at: usize, otherwise: &str| words.get(at).cloned().unwrap_or(otherwise.into());
    let (updates, size, rate): (usize, usize, f32) = (word(3, "100").parse()?, word(4, "32").parse()?, word(5, "1e-3").parse()?);
    let (parts, folder): (usize, _) = (word(6, "1").parse()?, word(2, ""));
    let (data, mut files) = (Path::new(&folder), HashMap::new());
    let mut trainer = Trainer::open(Path::new(&word(1, "")), parts > 1)?;
    for i in 0..updates * parts {
        let batch = read_batch(&trainer, &mut files, data, trainer.steps()?, size)?;
        let update = if i % parts == parts - 1 { 1.0 / parts as f32 } else { 0.0 };
        println!("loss {}", trainer.train(&batch, rate, update)?);
    }
    let batch = read_batch(&trainer, &mut files, data, 0, size)?;
    println!("evaluation {}", trainer.evaluate(&batch)?);
    trainer.save()?;
    println!("answer {}", trainer.answer(&batch)?.iter().map(f32::to_string).collect::<Vec<_>>().join(" "));
    Ok(())
}

fn main() {
    if let Err(error) = train(&std::env::args().collect::<Vec<_>>()) {
        eprintln!("error: {error}");
        std::process::exit(1);
    }
}
