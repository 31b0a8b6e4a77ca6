// train ARTIFACTS DATA [updates] [batch size] [learning rate] [batches an update]
//
// DATA has a file for each input of the batch, NAME.bin: its samples one after another, little-endian. The program goes on
// from ARTIFACTS/state.bin, trains, evaluates, saves, and answers for one sample with the inference model.

#include "trainer.hpp"

namespace {

Trainer::Values ReadBatch(const Trainer& trainer, const std::string& folder, size_t number, size_t count) {
  static std::map<std::string, std::string> files;
  Trainer::Values batch;
  for (const Trainer::Input& input : trainer.inputs) {
    if (input.role != "batch") continue;
    const std::string path = folder + "/" + input.name + ".bin";
    std::string& content = files[input.name];
    if (content.empty()) {
      std::ifstream stream(path, std::ios::binary);
      content.assign(std::istreambuf_iterator<char>(stream), {});
    }
    const size_t size = input.dims[0] < 0 ? input.size * count : input.size;
    if (content.size() % input.size || content.size() < size)
      throw std::runtime_error("'" + path + "' has " + std::to_string(content.size()) + " bytes, not " + std::to_string(size) +
                               " or more in samples of " + std::to_string(input.size));
    batch[input.name] = input.Tensor(&content[number % (content.size() / size) * size], size);
  }
  return batch;
}

}  // namespace

int main(int count, char** words) try {
  if (count < 3) throw std::runtime_error("usage: train ARTIFACTS DATA [updates] [batch size] [learning rate] [batches an update]");
  const auto number = [&](int at, double otherwise) { return count > at ? std::stod(words[at]) : otherwise; };
  const auto updates = static_cast<int>(number(3, 100)), parts = static_cast<int>(number(6, 1));
  const auto size = static_cast<size_t>(number(4, 32));
  const auto rate = static_cast<float>(number(5, 1e-3));
  Trainer trainer(words[1], parts > 1);
  for (int i = 0; i < updates * parts; ++i) {
    const Trainer::Values batch = ReadBatch(trainer, words[2], static_cast<size_t>(trainer.Steps()), size);
    std::printf("loss %.9g\n", trainer.Train(batch, rate, i % parts == parts - 1 ? 1 / static_cast<float>(parts) : 0));
  }
  const Trainer::Values batch = ReadBatch(trainer, words[2], 0, size);
  std::printf("evaluation %.9g\n", trainer.Evaluate(batch));
  trainer.Save();
  const Ort::Value answer = trainer.Answer(batch);
  const auto info = answer.GetTensorTypeAndShapeInfo();
  std::printf("answer");
  for (size_t i = 0; i < info.GetElementCount() / static_cast<size_t>(info.GetShape()[0]); ++i)
    std::printf(" %.9g", answer.GetTensorData<float>()[i]);
  std::printf("\n");
} catch (const std::exception& error) {
  std::fprintf(stderr, "error: %s\n", error.what());
  return 1;
}
