// Does with the C++ library what tests ask for on the command line; prints what it found, one number a line.
//
//   driver train FOLDER STATE BATCHES STEPS RATE [save=PATH] [export=PATH] [output=NAME] [weights=PATH] [eval]
//                [linear=WARMUP,TOTAL] [skip] [seed=N] [property=NAME] [modules=N] [accumulate=N] [values=STATE]
//   driver time FOLDER STATE BATCHES STEPS REPEATS THREADS       (processor time of a step in ms, once for each repeat)
//   driver load STATE...
//   driver session FOLDER STATE BATCHES STEPS RATE SAVED
//   driver mistakes FOLDER STATE BATCHES
//   driver nominal FOLDER STATE BATCHES
//
// BATCHES has, for each batch, each tensor: type (int64), rank (int64), sizes (int64 each), the bytes.

#include <ctime>
#include <fstream>
#include <iostream>

#include <onward/onward.hpp>

namespace {

struct Batch {
  std::vector<std::vector<uint8_t>> bytes;
  std::vector<Ort::Value> values;
};

std::vector<Batch> ReadBatches(const std::string& path, size_t inputs) {
  std::ifstream file(path, std::ios::binary);
  std::vector<Batch> batches;
  const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  int64_t type = 0;
  while (file.read(reinterpret_cast<char*>(&type), 8)) {
    if (batches.empty() || batches.back().values.size() == inputs) batches.emplace_back();
    int64_t rank = 0;
    file.read(reinterpret_cast<char*>(&rank), 8);
    std::vector<int64_t> dims(static_cast<size_t>(rank));
    file.read(reinterpret_cast<char*>(dims.data()), rank * 8);
    size_t size = type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT ? 4 : 8;
    for (const auto dim : dims) size *= static_cast<size_t>(dim);
    auto& batch = batches.back();
    batch.bytes.emplace_back(std::max<size_t>(size, 1));
    file.read(reinterpret_cast<char*>(batch.bytes.back().data()), static_cast<std::streamsize>(size));
    batch.values.push_back(Ort::Value::CreateTensor(memory, batch.bytes.back().data(), size, dims.data(), dims.size(),
                                                    static_cast<ONNXTensorElementDataType>(type)));
  }
  return batches;
}

using Options = std::map<std::string, std::string>;

Options ReadOptions(int count, char** words, int from) {
  Options options;
  for (int i = from; i < count; ++i) {
    const std::string word = words[i];
    const size_t at = word.find('=');
    options[word.substr(0, at)] = at == std::string::npos ? "" : word.substr(at + 1);
  }
  return options;
}

Ort::SessionOptions SessionOptions(int threads) {
  Ort::SessionOptions options;
  options.SetIntraOpNumThreads(threads);
  options.SetLogSeverityLevel(3);
  return options;
}

void Train(char** words, const Options& options, onward::CheckpointState& state, int first) {
  const std::filesystem::path folder = words[2];
  Ort::Env env(ORT_LOGGING_LEVEL_ERROR, "driver");
  onward::Module module(env, SessionOptions(1), state, folder / "gradient_step.onnx", folder / "eval_model.onnx");
  onward::Optimizer optimizer(module);
  if (options.count("values")) {
    auto other = onward::CheckpointState::Load(options.at("values"));
    const onward::Module source(env, SessionOptions(1), other, folder / "gradient_step.onnx");
    module.FromBuffer(source.ToBuffer(false), false);
  }
  if (std::stod(words[6]) > 0) optimizer.SetLearningRate(std::stod(words[6]));
  std::optional<onward::LinearLRScheduler> scheduler;
  if (options.count("linear")) {
    const auto numbers = onward::detail::Split(options.at("linear"), ',');
    scheduler.emplace(optimizer, std::stoll(numbers[0]), std::stoll(numbers[1]), std::stod(words[6]));
  }
  if (options.count("skip")) module.on_nonfinite = onward::OnNonFinite::kSkip;
  const int accumulate = options.count("accumulate") ? std::stoi(options.at("accumulate")) : 1;
  auto batches = ReadBatches(words[4], module.InputNames().size());
  for (int step = first; step < first + std::stoi(words[5]); ++step) {
    const auto& inputs = batches.at(static_cast<size_t>(step) % batches.size()).values;
    const auto results = module.TrainStep(inputs);
    std::printf("%.9g\n", static_cast<double>(*results[0].GetTensorData<float>()));
    if ((step + 1) % accumulate != 0) continue;
    optimizer.Step();
    module.LazyResetGrad();
    if (scheduler) scheduler->Step();
  }
  if (options.count("eval")) {
    const auto results = module.EvalStep(batches.at(0).values);
    std::printf("%.9g\n", static_cast<double>(*results[0].GetTensorData<float>()));
  }
  if (options.count("property")) state.AddProperty(options.at("property"), std::string("from\tC++\n"));
  if (options.count("save")) state.Save(options.at("save"));
  if (options.count("weights")) state.SaveWeights(options.at("weights"));
  if (options.count("export")) module.ExportModelForInferencing(options.at("export"), {options.at("output")});
}

void Time(char** words) {
  const std::filesystem::path folder = words[2];
  Ort::Env env(ORT_LOGGING_LEVEL_ERROR, "driver");
  auto state = onward::CheckpointState::Load(words[3]);
  onward::Module module(env, SessionOptions(std::stoi(words[7])), state, folder / "gradient_step.onnx");
  onward::Optimizer optimizer(module);
  optimizer.SetLearningRate(1e-4);
  auto batches = ReadBatches(words[4], module.InputNames().size());
  for (int repeat = 0; repeat < std::stoi(words[6]); ++repeat) {
    const std::clock_t start = std::clock();
    for (int step = 0; step < std::stoi(words[5]); ++step) {
      module.TrainStep(batches[0].values);
      optimizer.Step();
      module.LazyResetGrad();
    }
    const double passed = 1e3 * static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
    std::printf("%.6f\n", passed / std::stoi(words[5]));
  }
}

/// The names of onnxruntime-training: the same losses, parameters as one vector, a state from memory.
void Session(char** words) {
  const std::filesystem::path folder = words[2];
  std::ifstream file(words[3], std::ios::binary);
  const std::vector<uint8_t> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  Ort::Env env(ORT_LOGGING_LEVEL_ERROR, "driver");
  auto state = onward::CheckpointState::LoadCheckpointFromBuffer(bytes);
  onward::TrainingSession session(env, SessionOptions(1), state, folder / "gradient_step.onnx", folder / "eval_model.onnx");
  const int steps = std::stoi(words[5]);
  session.RegisterLinearLRScheduler(0, 2 * steps, std::stof(words[6]));
  auto batches = ReadBatches(words[4], 2);
  for (int step = 0; step < steps; ++step) {
    const auto results = session.TrainStep(batches.at(static_cast<size_t>(step)).values);
    std::printf("%.9g\n", static_cast<double>(*results[0].GetTensorData<float>()));
    session.OptimizerStep();
    session.SchedulerStep();
    session.LazyResetGrad();
  }
  const auto evaluated = [&] {
    return static_cast<double>(*session.EvalStep(batches[0].values)[0].GetTensorData<float>());
  };
  const double before = evaluated();
  if (session.InputNames(true) != session.InputNames(false) || session.OutputNames(true) != session.OutputNames(false))
    throw onward::Error("the names of evaluation are not those of training");
  auto kept = session.ToBuffer(true);
  auto zeros = session.ToBuffer(true);
  std::fill_n(zeros.GetTensorMutableData<float>(), zeros.GetTensorTypeAndShapeInfo().GetElementCount(), 0.0f);
  session.FromBuffer(zeros);
  std::printf("%.9g\n", evaluated());
  session.FromBuffer(kept);
  std::printf("%d\n", evaluated() == before);
  std::printf("%.9g\n", static_cast<double>(session.GetLearningRate()));
  state.AddProperty("share", 0.25);
  state.AddProperty("count", int64_t{-3});
  onward::CheckpointState::SaveCheckpoint(state, words[7]);
  auto again = onward::CheckpointState::LoadCheckpoint(words[7]);
  std::printf("%d\n", again.GetProperty("share") == onward::Property(0.25) &&
                          again.GetProperty("count") == onward::Property(int64_t{-3}) && again.OptimizerSteps() == 0 &&
                          state.OptimizerSteps() == steps);
}

template <typename Function>
void Expect(const std::string& what, Function&& function) {
  try {
    function();
    std::printf("%s: no error\n", what.c_str());
  } catch (const onward::Error& error) {
    std::string text = error.what();
    std::replace(text.begin(), text.end(), '\n', ' ');
    std::printf("%s: %s\n", what.c_str(), text.c_str());
  }
}

/// Everything that a program can do wrong; the state must come out of it as it went in.
void Mistakes(char** words) {
  const std::filesystem::path folder = words[2];
  Ort::Env env(ORT_LOGGING_LEVEL_ERROR, "driver");
  auto state = onward::CheckpointState::Load(words[3]);
  onward::Module module(env, SessionOptions(1), state, folder / "gradient_step.onnx", folder / "eval_model.onnx");
  onward::Optimizer optimizer(module);
  auto batches = ReadBatches(words[4], 2);
  const auto& good = batches.at(0).values;
  const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  std::vector<float> numbers(64);
  std::vector<int64_t> labels(8);
  const auto floats = [&](std::vector<int64_t> dims) {
    size_t count = 1;
    for (const auto dim : dims) count *= static_cast<size_t>(dim);
    return Ort::Value::CreateTensor<float>(memory, numbers.data(), count, dims.data(), dims.size());
  };
  const auto classes = [&](int64_t count) {
    return Ort::Value::CreateTensor<int64_t>(memory, labels.data(), static_cast<size_t>(count), &count, 1);
  };
  const auto step = [&](Ort::Value x, Ort::Value y) {
    std::vector<Ort::Value> inputs;
    inputs.push_back(std::move(x));
    inputs.push_back(std::move(y));
    module.LazyResetGrad();
    module.TrainStep(inputs);
  };
  Expect("no inputs", [&] { module.TrainStep({}); });
  Expect("a wrong width", [&] { step(floats({2, 5}), classes(2)); });
  Expect("a wrong rank", [&] { step(floats({4}), classes(4)); });
  Expect("a wrong type", [&] { step(classes(2), classes(2)); });
  Expect("an empty value", [&] { step(Ort::Value{nullptr}, classes(2)); });
  Expect("fewer labels", [&] { step(floats({3, 4}), classes(2)); });
  labels[1] = 3;
  Expect("a label too large", [&] { step(floats({2, 4}), classes(2)); });
  labels[1] = -1;
  Expect("a negative label", [&] { step(floats({2, 4}), classes(2)); });
  labels[1] = 0;
  module.LazyResetGrad();
  Expect("an update of nothing", [&] { optimizer.Step(); });
  Expect("a rate that is not finite", [&] { optimizer.SetLearningRate(std::nan("")); });
  Expect("no such parameter", [&] { state.GetParameter("w9"); });
  Expect("a parameter's shape", [&] { state.UpdateParameter("w1", floats({2, 4})); });
  Expect("a parameter's type", [&] { state.UpdateParameter("b1", classes(8)); });
  Expect("a buffer's size", [&] { module.FromBuffer(floats({2})); });
  Expect("no such property", [&] { state.GetProperty("nothing"); });
  auto alone = onward::CheckpointState::Load(words[3]);
  onward::Module trains_only(env, SessionOptions(1), alone, folder / "gradient_step.onnx");
  Expect("no eval model", [&] { trains_only.EvalStep(good); });
  Expect("an export without an eval model", [&] {
    trains_only.ExportModelForInferencing(folder / "new.onnx", {"scores"});
  });
  Expect("a status", [&] {
    const onward::Status status = trains_only.TryExportModelForInferencing(folder / "new.onnx", {"scores"});
    if (!status) throw onward::Error(status.ErrorMessage());
  });
  if (const auto status = onward::Try([&] { module.EvalStep(good); }); !status.IsOK() || !status.ErrorMessage().empty())
    throw onward::Error("a call that works has an error");
  Expect("no outputs", [&] { module.ExportModelForInferencing(folder / "new.onnx", {}); });
  Expect("no such output", [&] { module.ExportModelForInferencing(folder / "new.onnx", {"nothing"}); });
  Expect("the model itself", [&] {
    module.ExportModelForInferencing(folder / "inference_model.onnx", {"scores"});
  });
  Expect("another inference model", [&] {
    auto other = onward::CheckpointState::Load(words[3]);
    const auto eval = folder / "eval_model.onnx";
    onward::Module(env, SessionOptions(1), other, folder / "gradient_step.onnx", eval, eval)
        .ExportModelForInferencing(folder / "new.onnx", {"scores"});
  });
  Expect("no such folder", [&] { state.Save(folder / "nowhere" / "state.bin"); });
  Expect("a folder", [&] { state.Save(folder); });
  Expect("a second module", [&] { onward::Module(env, SessionOptions(1), state, folder / "gradient_step.onnx"); });
  Expect("another file", [&] {
    auto other = onward::CheckpointState::Load(words[3]);
    onward::Module(env, SessionOptions(1), other, folder / "train_step.onnx");
  });
  Expect("another update", [&] { onward::Optimizer(module, folder / "optimizer_model.onnx"); });
  Expect("no update", [&] { onward::Optimizer(module, folder / "missing.onnx"); });
  Expect("no file", [&] {
    auto other = onward::CheckpointState::Load(words[3]);
    onward::Module(env, SessionOptions(1), other, folder / "missing.onnx");
  });
  Expect("a schedule", [&] { onward::LinearLRScheduler(optimizer, -1, 10, 0.1); });
  state.Save(folder / "after.bin");
}

/// What a state without values refuses.
void Nominal(char** words) {
  const std::filesystem::path folder = words[2];
  Ort::Env env(ORT_LOGGING_LEVEL_ERROR, "driver");
  auto state = onward::CheckpointState::Load(words[3]);
  if (!state.IsNominal()) throw onward::Error("the state has values");
  onward::Module module(env, SessionOptions(1), state, folder / "gradient_step.onnx", folder / "eval_model.onnx");
  const auto batches = ReadBatches(words[4], module.InputNames().size());
  const auto name = state.ParameterNames(true).at(0);
  const std::vector<int64_t> one = {1};
  Ort::AllocatorWithDefaultOptions allocator;
  const auto buffer = Ort::Value::CreateTensor<float>(allocator, one.data(), 1);
  Expect("a training step", [&] { module.TrainStep(batches[0].values); });
  Expect("an evaluation", [&] { module.EvalStep(batches[0].values); });
  Expect("an export", [&] { module.ExportModelForInferencing(folder / "new.onnx", {"scores"}); });
  Expect("a buffer", [&] { module.ToBuffer(); });
  Expect("a file", [&] { state.Save(folder / "new.bin"); });
  Expect("weights", [&] { state.SaveWeights(folder / "new.bin"); });
  Expect("a parameter", [&] { state.GetParameter(name); });
  Expect("a new parameter", [&] { state.UpdateParameter(name, buffer); });
  Expect("trainable ones alone", [&] { module.FromBuffer(buffer); });
}

}  // namespace

int main(int count, char** words) {
  try {
    const std::string command = count > 1 ? words[1] : "";
    if (command == "train" && count >= 7) {
      const auto options = ReadOptions(count, words, 7);
      auto state = onward::CheckpointState::Load(words[3]);
      if (options.count("seed")) state.SetSeed(std::stoll(options.at("seed")));
      const int modules = options.count("modules") ? std::stoi(options.at("modules")) : 1;
      for (int i = 0; i < modules; ++i) Train(words, options, state, i * std::stoi(words[5]));
    } else if (command == "time" && count == 8) {
      Time(words);
    } else if (command == "load") {
      for (int i = 2; i < count; ++i) Expect(words[i], [&] { onward::CheckpointState::Load(words[i]); });
    } else if (command == "session" && count == 8) {
      Session(words);
    } else if (command == "mistakes" && count == 5) {
      Mistakes(words);
    } else if (command == "nominal" && count == 5) {
      Nominal(words);
    } else {
      std::cerr << "what should be done?\n";
      return 2;
    }
  } catch (const onward::Error& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return 0;
}
