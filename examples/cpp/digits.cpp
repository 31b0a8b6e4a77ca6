// Handwritten digits in C++: trained, saved, resumed, exported, and recognised by the exported model.
//
//   python examples/cpp/prepare.py build/digits
//   cmake -S examples/cpp -B build/cpp && cmake --build build/cpp
//   build/cpp/digits build/digits

#include <cstdio>
#include <fstream>
#include <numeric>

#include <onward/onward.hpp>

namespace {

constexpr int64_t kPixels = 64, kBatch = 32, kTrain = 1500;

template <typename Number>
std::vector<Number> Read(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<Number> numbers(std::filesystem::file_size(path) / sizeof(Number));
  file.read(reinterpret_cast<char*>(numbers.data()), static_cast<std::streamsize>(numbers.size() * sizeof(Number)));
  return numbers;
}

struct Digits {
  std::vector<float> images;
  std::vector<int64_t> labels;

  /// Tensors over some of the samples; nothing is copied.
  std::vector<Ort::Value> Batch(int64_t first, int64_t count) {
    const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
    const std::array<int64_t, 2> shape = {count, kPixels};
    std::vector<Ort::Value> batch;
    batch.push_back(Ort::Value::CreateTensor<float>(memory, images.data() + first * kPixels,
                                                    static_cast<size_t>(count * kPixels), shape.data(), 2));
    batch.push_back(Ort::Value::CreateTensor<int64_t>(memory, labels.data() + first, static_cast<size_t>(count),
                                                      shape.data(), 1));
    return batch;
  }
};

float Epoch(onward::Module& module, onward::Optimizer& optimizer, Digits& digits) {
  float loss = 0;
  for (int64_t first = 0; first + kBatch <= kTrain; first += kBatch) {
    const auto results = module.TrainStep(digits.Batch(first, kBatch));
    loss = *results[0].GetTensorData<float>();
    optimizer.Step();
    module.LazyResetGrad();
  }
  return loss;
}

double Accuracy(const Ort::Env& env, const std::filesystem::path& model, Digits& digits) {
  Ort::Session session(env, model.c_str(), Ort::SessionOptions{});
  const auto count = static_cast<int64_t>(digits.labels.size()) - kTrain;
  auto batch = digits.Batch(kTrain, count);
  const char* input = "image";
  const char* output = "scores";
  const auto scores = session.Run(Ort::RunOptions{}, &input, batch.data(), 1, &output, 1);
  const float* row = scores[0].GetTensorData<float>();
  int64_t right = 0;
  for (int64_t i = 0; i < count; ++i, row += 10)
    right += std::max_element(row, row + 10) - row == digits.labels[static_cast<size_t>(kTrain + i)];
  return static_cast<double>(right) / static_cast<double>(count);
}

}  // namespace

int main(int count, char** words) {
  const std::filesystem::path folder = count > 1 ? words[1] : "build/digits";
  try {
    Digits digits{Read<float>(folder / "images.bin"), Read<int64_t>(folder / "labels.bin")};
    const Ort::Env env;
    Ort::SessionOptions options;
    options.SetIntraOpNumThreads(1);  // a small network gains nothing from more
    {
      auto state = onward::CheckpointState::Load(folder / "state.bin");
      onward::Module module(env, options, state, folder / "gradient_step.onnx", folder / "eval_model.onnx");
      onward::Optimizer optimizer(module);
      optimizer.SetLearningRate(0.003);
      for (int64_t epoch = 1; epoch <= 3; ++epoch) {
        const float loss = Epoch(module, optimizer, digits);
        std::printf("epoch %lld: loss %.4f\n", static_cast<long long>(epoch), static_cast<double>(loss));
        state.AddProperty("epoch", epoch);
      }
      state.Save(folder / "trained.bin");
    }
    auto state = onward::CheckpointState::Load(folder / "trained.bin");
    onward::Module module(env, options, state, folder / "gradient_step.onnx", folder / "eval_model.onnx");
    onward::Optimizer optimizer(module);  // goes on with the learning rate, the momenta and the random numbers
    std::printf("resumed after epoch %lld\n", static_cast<long long>(std::get<int64_t>(state.GetProperty("epoch"))));
    for (int epoch = 4; epoch <= 6; ++epoch)
      std::printf("epoch %d: loss %.4f\n", epoch, static_cast<double>(Epoch(module, optimizer, digits)));
    module.ExportModelForInferencing(folder / "digits.onnx", {"scores"});
    std::printf("accuracy %.3f\n", Accuracy(env, folder / "digits.onnx", digits));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
