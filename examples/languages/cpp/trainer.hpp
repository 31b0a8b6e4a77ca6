// Trains with onnxruntime's C++ API, over the files that `onward artifacts MODEL --portable` writes. Lift this file and
// ../c/sha256.h; train.cpp shows how to use them. It goes on from state.bin in the folder.
#pragma once
#include <onnxruntime_cxx_api.h>
#include <sha256.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

class Trainer {
 public:
  using Values = std::map<std::string, Ort::Value>;

  /// A line of the table `onward.inputs`: what an input is, where it begins in a state file, its bytes, type and shape.
  struct Input {
    std::string name, role;
    size_t offset = 0, size = 0;
    int type = 0;
    std::vector<int64_t> dims;

    /// A tensor of these bytes: of as many samples as they are, where the first axis is free.
    Ort::Value Tensor(const char* content, size_t bytes) const {
      std::vector<int64_t> shape = dims;
      if (shape[0] < 0) shape[0] = static_cast<int64_t>(bytes / size);
      Ort::AllocatorWithDefaultOptions allocator;
      auto value = Ort::Value::CreateTensor(allocator, shape.data(), shape.size(), static_cast<ONNXTensorElementDataType>(type));
      std::memcpy(value.GetTensorMutableRawData(), content, bytes);
      return value;
    }
  };

  std::vector<Input> inputs;  // of the step, in its order: batch, learning rate, state, sums of gradients

  /// Opens the artifacts of a folder. With `accumulates`, several batches can make one update.
  explicit Trainer(const std::filesystem::path& folder, bool accumulates = false)
      : folder_(folder),
        step_(Open(accumulates ? "accumulate_step.onnx" : "train_step.onnx")),
        evaluation_(Open("eval_step.onnx")) {
    if (About("onward.portable") != "2") throw std::runtime_error("this is not a portable step of version 2");
    std::ifstream stream(path_, std::ios::binary);
    file_.assign(std::istreambuf_iterator<char>(stream), {});
    if (file_.size() < 96 || Checksum() != file_.substr(file_.size() - 32))
      throw std::runtime_error("'" + path_.string() + "' is damaged: its content does not match its checksum");
    std::ostringstream digest;
    for (size_t i = 32; i < 64; ++i) digest << std::hex << std::setw(2) << std::setfill('0') << (file_[i] & 255);
    if (digest.str() != About("onward.state_digest")) throw std::runtime_error("'" + path_.string() + "' is the state of another model");
    std::istringstream table(About("onward.inputs"));
    for (const std::string& name : step_.GetInputNames()) {
      std::string line;
      std::getline(table, line);
      std::istringstream words(line);
      Input& input = inputs.emplace_back();
      words >> input.role >> input.offset >> input.size >> input.type;
      for (int64_t dim; words >> dim;) input.dims.push_back(dim);
      input.name = name;
      if (input.role == "rate") rate_ = name;
      if (input.role == "steps") steps_ = name;
      const std::string zeros(input.size, '\0');
      if (input.role != "batch") values_[name] = input.Tensor(input.offset ? &file_[input.offset] : zeros.data(), input.size);
    }
  }

  /// How many batches this state has seen.
  int64_t Steps() const { return *values_.at(steps_).GetTensorData<int64_t>(); }

  /// Trains on a batch and returns its loss. A trainer that accumulates multiplies the sum of the gradients by `update`,
  /// 1/4 after four batches, say, and updates by it, where `update` is not 0; any other updates by each batch.
  float Train(const Values& batch, float rate, float update = 1) {
    const float numbers[] = {rate, update};
    Ort::Value& value = values_[rate_];  // has the first alone, where it does not accumulate
    std::copy_n(numbers, value.GetTensorTypeAndShapeInfo().GetElementCount(), value.GetTensorMutableData<float>());
    std::vector<Ort::Value> outputs = Run(step_, batch);
    const size_t results = std::stoul(About("onward.results"));
    const float loss = CheckedLoss(outputs, results);
    const size_t first = inputs.size() - (outputs.size() - results);  // frozen tensors come first and stay
    for (size_t i = results; i < outputs.size(); ++i) values_[inputs[first + i - results].name] = std::move(outputs[i]);
    return loss;
  }

  float Evaluate(const Values& batch) {
    const std::vector<Ort::Value> outputs = Run(evaluation_, batch);
    return CheckedLoss(outputs, outputs.size());
  }

  /// The first output of the inference model, which reads the weights that were saved.
  Ort::Value Answer(const Values& batch) {
    Ort::Session session = Open("inference_model.onnx");
    return std::move(Run(session, batch)[0]);
  }

  /// Writes all of the state or nothing: what was there stays until the new content is on the disk.
  void Save() {
    for (const Input& input : inputs)
      if (input.offset) std::memcpy(&file_[input.offset], values_[input.name].GetTensorRawData(), input.size);
    file_.replace(file_.size() - 32, 32, Checksum());
    const std::string temporary = path_.string() + ".tmp";
    std::FILE* file = std::fopen(temporary.c_str(), "wb");
    bool good = file && std::fwrite(file_.data(), 1, file_.size(), file) == file_.size() && !std::fflush(file);
    good = good && !fsync(fileno(file));
    good = file && !std::fclose(file) && good;
    if (!good) throw std::runtime_error("'" + path_.string() + "' cannot be written");
    std::filesystem::rename(temporary, path_);
  }

 private:
  Ort::Session Open(const char* name) const {
    Ort::SessionOptions options;
    options.SetIntraOpNumThreads(1);  // more pay only for large models
    return Ort::Session(env_, (folder_ / name).c_str(), options);
  }

  std::string About(const char* key) const {
    Ort::AllocatorWithDefaultOptions allocator;
    const auto text = step_.GetModelMetadata().LookupCustomMetadataMapAllocated(key, allocator);
    return text ? text.get() : "";
  }

  /// Runs a model on what it takes of the batch and the state.
  std::vector<Ort::Value> Run(Ort::Session& session, const Values& batch) {
    const auto names = session.GetInputNames(), output_names = session.GetOutputNames();
    std::vector<const char*> in, out;
    std::vector<const OrtValue*> taken;
    for (const auto& name : names) in.push_back(name.c_str());
    for (const auto& name : names) taken.push_back(batch.count(name) ? batch.at(name) : values_.at(name));
    for (const auto& name : output_names) out.push_back(name.c_str());
    std::vector<OrtValue*> results(out.size());
    Ort::ThrowOnError(Ort::GetApi().Run(session, nullptr, in.data(), taken.data(), in.size(), out.data(), out.size(), results.data()));
    return {results.begin(), results.end()};
  }

  /// The loss; or an error that says what is wrong with the batch, and nothing has changed.
  float CheckedLoss(const std::vector<Ort::Value>& outputs, size_t results) {
    const int64_t* problem = outputs[results - 1].GetTensorData<int64_t>();  // a line of `onward.problems`, and a number
    std::istringstream sentences(About("onward.problems"));
    std::string line;
    for (int64_t i = 0; i < problem[0]; ++i) std::getline(sentences, line);
    if (problem[0]) throw std::invalid_argument(line + std::to_string(problem[1]));
    return outputs[0].GetTensorData<float>()[0];
  }

  std::string Checksum() const {
    std::string sum(32, '\0');
    sha256(reinterpret_cast<const uint8_t*>(file_.data()), file_.size() - 32, reinterpret_cast<uint8_t*>(sum.data()));
    return sum;
  }

  Ort::Env env_{ORT_LOGGING_LEVEL_ERROR};
  std::filesystem::path folder_, path_ = folder_ / "state.bin";
  Ort::Session step_, evaluation_;
  std::string file_, rate_, steps_;
  Values values_;  // all but the batch
};
