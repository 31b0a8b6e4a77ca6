// Onward: train ONNX models in C++17, over onnxruntime's own C++ API and nothing else.
//
// Works on the files that `onward artifacts --portable` writes: gradient_step.onnx and update_step.onnx (the two halves
// of the portable step), state.bin (its state), eval_model.onnx and inference_model.onnx. docs/portable-format.md specifies
// them, docs/cpp.md shows how to use this header. The names are those of onnxruntime-training's C++ API.
//
// Parameters, gradients and the optimizer's state each lie in one stretch of memory, which sessions read and write in
// place: nothing is copied. A training step writes gradients only, so one that fails leaves the state as it was.
//
// Not safe to use from several threads at once; one Module in each thread is.

#pragma once

#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <functional>
#include <limits>
#include <locale>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <random>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#ifdef _WIN32
#include <io.h>
#else
#include <unistd.h>
#endif

namespace onward {

/// Base of every error that Onward throws.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A model that cannot be used as given.
class ModelError : public Error {
 public:
  using Error::Error;
};

/// A loss or gradient that is NaN or infinite; parameters were left as they were.
class NonFiniteError : public Error {
 public:
  using Error::Error;
};

/// A state file that cannot be read or written.
class CheckpointError : public Error {
 public:
  CheckpointError(const std::filesystem::path& path, const std::string& reason)
      : Error("checkpoint '" + path.string() + "': " + reason) {}
};

/// What a call came to, where an error is a value: `Try` makes it of any call.
class Status {
 public:
  static Status OK() { return Status(); }
  explicit Status(std::string message) : message_(std::move(message)) {}

  bool IsOK() const { return !message_; }
  explicit operator bool() const { return IsOK(); }
  /// What went wrong; empty where nothing did.
  std::string ErrorMessage() const { return message_.value_or(""); }

 private:
  Status() = default;
  std::optional<std::string> message_;
};

/// Do something, and say how it went instead of throwing: `auto status = onward::Try([&] { optimizer.Step(); });`
template <typename Call>
Status Try(Call&& call) {
  try {
    call();
    return Status::OK();
  } catch (const std::exception& error) {
    return Status(std::string(error.what()));
  }
}

/// What a checkpoint keeps under a name for the user.
using Property = std::variant<int64_t, double, std::string>;

namespace detail {

constexpr size_t kAlignment = 64;
constexpr size_t kHeader = 64;
constexpr size_t kDigest = 32;
constexpr uint64_t kMostText = uint64_t{1} << 28;
constexpr std::string_view kMagic = "ONWDSTAT";
constexpr std::array<std::string_view, 7> kRoles = {
    "frozen", "statistic", "trainable", "slot", "optimizer_step", "train_step", "random_seed"};

inline uint64_t Aligned(uint64_t size) { return (size + kAlignment - 1) / kAlignment * kAlignment; }

// ---- sha256 ------------------------------------------------------------------------------------------

class Sha256 {
 public:
  void Update(const void* data, size_t size) {
    auto* bytes = static_cast<const uint8_t*>(data);
    length_ += size;
    if (filled_ > 0) {
      const size_t taken = std::min(size, block_.size() - filled_);
      std::memcpy(block_.data() + filled_, bytes, taken);
      filled_ += taken;
      bytes += taken;
      size -= taken;
      if (filled_ < block_.size()) return;
      Mix(block_.data());
      filled_ = 0;
    }
    for (; size >= block_.size(); bytes += block_.size(), size -= block_.size()) Mix(bytes);
    if (size > 0) std::memcpy(block_.data(), bytes, size);
    filled_ = size;
  }

  std::array<uint8_t, kDigest> Finish() {
    const uint64_t bits = length_ * 8;
    const uint8_t one = 0x80, zero = 0;
    Update(&one, 1);
    while (filled_ != 56) Update(&zero, 1);
    std::array<uint8_t, 8> end{};
    for (size_t i = 0; i < 8; ++i) end[i] = static_cast<uint8_t>(bits >> (56 - 8 * i));
    Update(end.data(), end.size());
    std::array<uint8_t, kDigest> digest{};
    for (size_t i = 0; i < digest.size(); ++i)
      digest[i] = static_cast<uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
    return digest;
  }

 private:
  static uint32_t Turn(uint32_t x, int by) { return (x >> by) | (x << (32 - by)); }

  void Mix(const uint8_t* block) {
    static constexpr std::array<uint32_t, 64> kKeys = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
        0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
        0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
        0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
        0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
        0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
    std::array<uint32_t, 64> w;
    for (size_t i = 0; i < 16; ++i)
      w[i] = uint32_t{block[4 * i]} << 24 | uint32_t{block[4 * i + 1]} << 16 |
             uint32_t{block[4 * i + 2]} << 8 | uint32_t{block[4 * i + 3]};
    for (size_t i = 16; i < 64; ++i) {
      const uint32_t a = Turn(w[i - 15], 7) ^ Turn(w[i - 15], 18) ^ (w[i - 15] >> 3);
      const uint32_t b = Turn(w[i - 2], 17) ^ Turn(w[i - 2], 19) ^ (w[i - 2] >> 10);
      w[i] = w[i - 16] + a + w[i - 7] + b;
    }
    auto [a, b, c, d, e, f, g, h] = state_;
    for (size_t i = 0; i < 64; ++i) {
      const uint32_t s1 = Turn(e, 6) ^ Turn(e, 11) ^ Turn(e, 25);
      const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kKeys[i] + w[i];
      const uint32_t s0 = Turn(a, 2) ^ Turn(a, 13) ^ Turn(a, 22);
      const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
      h = g;
      g = f;
      f = e;
      e = d + t1;
      d = c;
      c = b;
      b = a;
      a = t1 + t2;
    }
    const std::array<uint32_t, 8> made = {a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < 8; ++i) state_[i] += made[i];
  }

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> block_{};
  size_t filled_ = 0;
  uint64_t length_ = 0;
};

inline std::string Hex(const uint8_t* bytes, size_t size) {
  std::string text;
  for (size_t i = 0; i < size; ++i) {
    text += "0123456789abcdef"[bytes[i] >> 4];
    text += "0123456789abcdef"[bytes[i] & 15];
  }
  return text;
}

// ---- text --------------------------------------------------------------------------------------------

inline std::vector<std::string> Split(std::string_view text, char by) {
  std::vector<std::string> parts;
  for (size_t start = 0;;) {
    const size_t end = text.find(by, start);
    parts.emplace_back(text.substr(start, end == std::string_view::npos ? end : end - start));
    if (end == std::string_view::npos) return parts;
    start = end + 1;
  }
}

inline std::string Unescape(const std::string& field) {
  std::string plain;
  for (size_t i = 0; i < field.size(); ++i) {
    if (field[i] != '\\') {
      plain += field[i];
      continue;
    }
    switch (++i < field.size() ? field[i] : '\0') {
      case '\\': plain += '\\'; break;
      case 't': plain += '\t'; break;
      case 'n': plain += '\n'; break;
      case 'r': plain += '\r'; break;
      default: throw Error("a backslash stands alone");
    }
  }
  return plain;
}

inline std::string Escape(const std::string& plain) {
  std::string field;
  for (const char c : plain) {
    switch (c) {
      case '\\': field += "\\\\"; break;
      case '\t': field += "\\t"; break;
      case '\n': field += "\\n"; break;
      case '\r': field += "\\r"; break;
      default: field += c;
    }
  }
  return field;
}

inline bool IsUtf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto first = static_cast<uint8_t>(text[i]);
    const size_t more = first < 0x80 ? 0 : first < 0xc2 ? 4 : first < 0xe0 ? 1 : first < 0xf0 ? 2 : first < 0xf5 ? 3 : 4;
    if (more == 4 || more >= text.size() - i) return false;
    for (size_t k = 1; k <= more; ++k)
      if ((static_cast<uint8_t>(text[i + k]) & 0xc0) != 0x80) return false;
    const auto second = more > 0 ? static_cast<uint8_t>(text[i + 1]) : uint8_t{0};
    // the shortest form only, no halves of pairs, nothing past the last character
    if ((first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f) || (first == 0xf0 && second < 0x90) ||
        (first == 0xf4 && second > 0x8f))
      return false;
    i += 1 + more;
  }
  return true;
}

inline uint64_t Count(const std::string& text) {
  if (text.empty() || text.size() > 18 || text.find_first_not_of("0123456789") != std::string::npos)
    throw Error("'" + text + "' is not a count");
  return std::stoull(text);
}

inline std::vector<int64_t> Dims(const std::string& text) {
  std::vector<int64_t> dims;
  if (text.empty()) return dims;
  for (const auto& dim : Split(text, ',')) dims.push_back(static_cast<int64_t>(Count(dim)));
  if (dims.size() > 32) throw Error("the shape [" + text + "] is beyond all files");
  return dims;
}

/// How many numbers a shape has; an error where they are more than any file holds.
inline uint64_t Elements(const std::vector<int64_t>& dims) {
  uint64_t count = 1;
  bool none = false;
  for (const int64_t dim : dims) {
    if (dim == 0) {
      none = true;
    } else if (static_cast<uint64_t>(dim) >= (uint64_t{1} << 60) / count) {
      throw Error("a shape is beyond all files");
    } else {
      count *= static_cast<uint64_t>(dim);
    }
  }
  return none ? 0 : count;
}

inline std::string Shown(const std::vector<int64_t>& dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + "]";
}

struct Kind {
  std::string_view name;
  ONNXTensorElementDataType type;
  size_t size;
};

inline const Kind& KindOf(std::string_view name) {
  static constexpr std::array<Kind, 17> kKinds = {{
      {"float32", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, 4},
      {"float64", ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE, 8},
      {"float16", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, 2},
      {"bfloat16", ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16, 2},
      {"int64", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, 8},
      {"int32", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, 4},
      {"int16", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16, 2},
      {"int8", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, 1},
      {"uint64", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT64, 8},
      {"uint32", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT32, 4},
      {"uint16", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16, 2},
      {"uint8", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8, 1},
      {"bool", ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL, 1},
      {"float8_e4m3fn", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN, 1},
      {"float8_e4m3fnuz", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FNUZ, 1},
      {"float8_e5m2", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E5M2, 1},
      {"float8_e5m2fnuz", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E5M2FNUZ, 1},
  }};
  for (const auto& kind : kKinds)
    if (kind.name == name) return kind;
  throw Error("there is no type '" + std::string(name) + "'");
}

inline std::string TypeName(ONNXTensorElementDataType type) {
  for (const auto* name : {"float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint64",
                           "uint32", "uint16", "uint8", "bool"})
    if (KindOf(name).type == type) return name;
  return "of type " + std::to_string(static_cast<int>(type));
}

// ---- the layout of a state ---------------------------------------------------------------------------

/// A parameter, a slot of the optimizer's state, or a counter.
struct Part {
  std::string role, name, slot;
  std::vector<int64_t> dims;
  uint64_t offset = 0, bytes = 0;
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
};

/// An input of the step.
struct Tensor {
  std::string name;
  std::vector<int64_t> dims;
  uint64_t offset = 0, bytes = 0;
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  size_t item = 0;
  size_t first = 0, last = 0;  // its parts
};

struct Layout {
  std::vector<Tensor> tensors;
  std::vector<Part> parts;
  uint64_t end = kHeader, weights_end = kHeader;
  std::string text;

  size_t role(size_t part) const {
    return static_cast<size_t>(std::find(kRoles.begin(), kRoles.end(), parts[part].role) - kRoles.begin());
  }

  const Part* Find(const std::string& name) const {
    for (size_t i = 0; i < parts.size(); ++i)
      if (parts[i].name == name && role(i) < 3) return &parts[i];
    return nullptr;
  }

  /// From where the tensors of a role begin to where they end; both 0 where there are none.
  std::pair<uint64_t, uint64_t> Stretch(std::string_view of) const {
    std::pair<uint64_t, uint64_t> found{0, 0};
    for (const auto& tensor : tensors) {
      if (parts[tensor.first].role != of) continue;
      if (found.second == 0) found.first = tensor.offset;
      found.second = tensor.offset + Aligned(tensor.bytes);
    }
    return found;
  }

  const Part& Counter(std::string_view name) const {
    for (const auto& part : parts)
      if (part.role == name) return part;
    throw Error("there is no counter '" + std::string(name) + "'");
  }

  /// Read the table line by line; every offset must be the one that follows from the sizes before it.
  void Add(const std::string& line) {
    auto fields = Split(line, '\t');
    for (auto& field : fields) field = Unescape(field);
    if (fields[0] == "tensor" && fields.size() == 5) {
      const Kind& kind = KindOf(fields[2]);
      Tensor made{fields[1], Dims(fields[3]), end, 0, kind.type, kind.size, parts.size(), parts.size()};
      made.bytes = Elements(made.dims) * kind.size;
      if (made.name.empty() || Count(fields[4]) != end) throw Error("tensor '" + made.name + "' is elsewhere");
      if (!tensors.empty() && tensors.back().first == tensors.back().last) throw Error("a tensor has no parts");
      end += Aligned(made.bytes);
      if (end > (uint64_t{1} << 62)) throw Error("the state is beyond all files");
      tensors.push_back(std::move(made));
      text += line + "\n";
      return;
    }
    const bool slot = fields[0] == "slot";
    if (std::find(kRoles.begin(), kRoles.end(), fields[0]) == kRoles.end() || fields.size() != (slot ? 5u : 4u) ||
        tensors.empty())
      throw Error("a line begins with '" + fields[0] + "' and has " + std::to_string(fields.size() - 1) +
                  " fields more");
    Tensor& tensor = tensors.back();
    Part part{fields[0], fields[1], slot ? fields[4] : "", Dims(fields[2]), tensor.offset, 0, tensor.type};
    part.bytes = Elements(part.dims) * tensor.item;
    const bool follows = tensor.last > tensor.first;
    if (follows) part.offset = Aligned(parts.back().offset + parts.back().bytes);
    if (part.name.empty() || Count(fields[3]) != part.offset || part.offset > tensor.offset + tensor.bytes ||
        part.bytes > tensor.offset + tensor.bytes - part.offset || (follows && parts.back().role != part.role))
      throw Error("'" + part.name + "' does not lie in '" + tensor.name + "' where it should");
    parts.push_back(std::move(part));
    tensor.last = parts.size();
    if (parts.size() > 1 && role(parts.size() - 1) < role(parts.size() - 2))
      throw Error("tensors are not in the order of their roles");
    if (role(parts.size() - 1) < 3) weights_end = end;
    text += line + "\n";
  }

  void Check() const {
    std::set<std::string> names;
    for (const auto& tensor : tensors)
      if (!names.insert(tensor.name).second) throw Error("two tensors have the same name");
    std::set<std::pair<std::string, std::string>> found;
    size_t counters = 0;
    for (size_t i = 0; i < parts.size(); ++i) {
      if (role(i) < 4 && !found.insert({parts[i].name, parts[i].slot}).second)
        throw Error("two parts have the same name");
      if (role(i) < 4) continue;
      if (role(i) != 4 + counters++ || parts[i].dims != std::vector<int64_t>{1} ||
          parts[i].type != ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64)
        throw Error("the counters are not one int64 each");
    }
    if (counters != 3) throw Error("the counters are not one int64 each");
    for (const auto& tensor : tensors)
      if (tensor.first == tensor.last || (role(tensor.first) > 3 && tensor.dims != std::vector<int64_t>{1}))
        throw Error("tensor '" + tensor.name + "' does not fit its parts");
  }
};

// ---- memory and files --------------------------------------------------------------------------------

struct FreeAligned {
  void operator()(uint8_t* memory) const { ::operator delete[](memory, std::align_val_t{kAlignment}); }
};
using Memory = std::unique_ptr<uint8_t[], FreeAligned>;

inline Memory Allocate(uint64_t size) {
  if (size > std::numeric_limits<size_t>::max()) throw Error("the state is larger than this machine's memory");
  const auto count = static_cast<size_t>(std::max<uint64_t>(size, 1));
  return Memory(new (std::align_val_t{kAlignment}) uint8_t[count]());
}

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, CloseFile>;

inline File Open(const std::filesystem::path& path, bool writing) {
#ifdef _WIN32
  return File(_wfopen(path.c_str(), writing ? L"wbx" : L"rb"));
#else
  return File(std::fopen(path.c_str(), writing ? "wbx" : "rb"));
#endif
}

inline std::string Reason() { return errno ? std::strerror(errno) : "it failed"; }

/// Write a file as a whole or not at all: beside the target, flushed to the disk, then renamed.
inline void ReplaceFile(const std::filesystem::path& given, const std::function<void(std::FILE*)>& write,
                        const std::function<void(const std::filesystem::path&)>& check = {}) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  fs::path path = given;
  // what a link leads to is replaced, not the link
  for (int links = 0; links < 40 && fs::is_symlink(path, ignored); ++links)
    path = path.parent_path() / fs::read_symlink(path, ignored);
  std::random_device random;
  std::ostringstream suffix;
  suffix << std::hex << random() << random() << ".onward-tmp";
  const fs::path temporary =
      path.parent_path() / fs::path("." + path.filename().string() + "." + suffix.str());
  const std::string refused = "not committed, the old one is kept: ";
  if (fs::is_directory(path, ignored)) throw CheckpointError(path, refused + "it is a folder");
  errno = 0;
  File file = Open(temporary, true);
  if (!file) throw CheckpointError(path, refused + Reason());
  try {
    errno = 0;
    write(file.get());
#ifdef _WIN32
    const bool safe = std::fflush(file.get()) == 0 && _commit(_fileno(file.get())) == 0;
#else
    const bool safe = std::fflush(file.get()) == 0 && ::fsync(::fileno(file.get())) == 0;
#endif
    if (!safe || std::fclose(file.release()) != 0) throw CheckpointError(path, refused + Reason());
    if (check) check(temporary);
    fs::rename(temporary, path);
  } catch (const fs::filesystem_error& error) {
    fs::remove(temporary, ignored);
    throw CheckpointError(path, refused + error.code().message());
  } catch (...) {
    file.reset();
    fs::remove(temporary, ignored);
    throw;
  }
}

inline void WriteAll(std::FILE* file, const void* data, size_t size, const std::filesystem::path& path) {
  if (size > 0 && std::fwrite(data, 1, size, file) != size)
    throw CheckpointError(path, "not committed, the old one is kept: " + Reason());
}

inline std::string ReadFile(const std::filesystem::path& path) {
  errno = 0;
  File file = Open(path, false);
  std::error_code problem;
  const auto size = std::filesystem::file_size(path, problem);
  if (!file || problem) throw ModelError("cannot read '" + path.string() + "': " + Reason());
  std::string content(static_cast<size_t>(size), '\0');
  if (std::fread(content.data(), 1, content.size(), file.get()) != content.size())
    throw ModelError("cannot read '" + path.string() + "': " + Reason());
  return content;
}

}  // namespace detail

class Module;

// ======================================================================================================

/// What training changes and what a checkpoint holds. Made by `Load`.
class CheckpointState {
 public:
  CheckpointState(CheckpointState&&) = default;
  CheckpointState& operator=(CheckpointState&&) = default;

  /// Read a state file, verified before anything of it is used.
  static CheckpointState Load(const std::filesystem::path& path) {
    namespace fs = std::filesystem;
    std::error_code problem;
    if (!fs::is_regular_file(path, problem)) {
      const bool there = fs::exists(path, problem);
      throw CheckpointError(path, there ? "it is not a regular file" : "No such file or directory");
    }
    errno = 0;
    detail::File file = detail::Open(path, false);
    const auto size = static_cast<uint64_t>(fs::file_size(path, problem));
    if (!file || problem) throw CheckpointError(path, detail::Reason());
    const auto read = [&](void* into, uint64_t count) {
      if (count > 0 && std::fread(into, 1, static_cast<size_t>(count), file.get()) != count)
        throw CheckpointError(path, "the file became shorter while it was read");
    };
    CheckpointState state;
    std::array<uint8_t, detail::kHeader> header{};
    if (size < header.size()) throw CheckpointError(path, "this is not a state file of a portable step");
    read(header.data(), header.size());
    const uint64_t text_size = state.ReadHeader(header.data(), size, path);
    state.memory_ = detail::Allocate(state.end_);
    std::memcpy(state.memory_.get(), header.data(), header.size());
    read(state.memory_.get() + header.size(), state.end_ - header.size());
    std::string text(static_cast<size_t>(text_size), '\0');
    read(text.data(), text_size);
    std::array<uint8_t, detail::kDigest> expected{};
    read(expected.data(), expected.size());
    state.Finish(text, expected, path);
    return state;
  }

  /// The same as `Load`, under the name of onnxruntime-training.
  static CheckpointState LoadCheckpoint(const std::filesystem::path& path) { return Load(path); }

  /// Read a state from memory.
  static CheckpointState LoadCheckpointFromBuffer(const std::vector<uint8_t>& buffer) {
    const std::filesystem::path path = "buffer in memory";
    CheckpointState state;
    if (buffer.size() < detail::kHeader) throw CheckpointError(path, "this is not a state file of a portable step");
    const uint64_t text_size = state.ReadHeader(buffer.data(), buffer.size(), path);
    const auto end = static_cast<size_t>(state.end_);
    state.memory_ = detail::Allocate(state.end_);
    std::memcpy(state.memory_.get(), buffer.data(), end);
    const std::string text(reinterpret_cast<const char*>(buffer.data()) + end, static_cast<size_t>(text_size));
    std::array<uint8_t, detail::kDigest> expected{};
    std::memcpy(expected.data(), buffer.data() + buffer.size() - expected.size(), expected.size());
    state.Finish(text, expected, path);
    return state;
  }

  /// Whether the parameters have no values yet: `nominal_state.bin` has their names, and `Module::FromBuffer` fills them.
  bool IsNominal() const { return nominal_; }

  /// Write a state file; the old one stays until the new one is safely there.
  void Save(const std::filesystem::path& path) const { Write(path, true); }

  /// `Save` under the name of onnxruntime-training. Without the optimizer's state, that starts from zero again.
  static void SaveCheckpoint(const CheckpointState& state, const std::filesystem::path& path,
                             bool include_optimizer_state = false) {
    state.Write(path, include_optimizer_state);
  }

  /// Write as much of a state file as inference_model.onnx reads: to be put beside a copy of that model, as `state.bin`.
  void SaveWeights(const std::filesystem::path& path) const {
    RequireValues();
    detail::ReplaceFile(path, [&](std::FILE* file) {
      detail::WriteAll(file, memory_.get(), static_cast<size_t>(layout_.weights_end), path);
    });
  }

  /// Keep a value of the user's in the checkpoint.
  void AddProperty(const std::string& name, const Property& value) {
    if (name.empty()) throw Error("a property must have a name");
    properties_[name] = value;
  }

  /// A property; an error where there is none of that name.
  Property GetProperty(const std::string& name) const {
    const auto found = properties_.find(name);
    if (found == properties_.end()) throw Error("Property " + name + " not found.");
    return found->second;
  }

  bool HasProperty(const std::string& name) const { return properties_.count(name) > 0; }

  /// The names of the parameters, trainable ones first or alone.
  std::vector<std::string> ParameterNames(bool trainable_only = false) const {
    std::vector<std::string> names, others;
    for (const auto& part : layout_.parts) {
      if (part.role == "trainable") names.push_back(part.name);
      if (part.role == "frozen" || part.role == "statistic") others.push_back(part.name);
    }
    if (!trainable_only) names.insert(names.end(), others.begin(), others.end());
    return names;
  }

  /// A copy of a parameter.
  Ort::Value GetParameter(const std::string& name) const {
    const detail::Part& part = Require(name);
    RequireValues();
    Ort::AllocatorWithDefaultOptions allocator;
    Ort::Value copy = Ort::Value::CreateTensor(allocator, part.dims.data(), part.dims.size(), part.type);
    if (part.bytes > 0)
      std::memcpy(copy.GetTensorMutableRawData(), At(part.offset), static_cast<size_t>(part.bytes));
    return copy;
  }

  /// Give a parameter other numbers, of the same shape and type.
  void UpdateParameter(const std::string& name, const Ort::Value& value) {
    const detail::Part& part = Require(name);
    RequireValues();
    const auto info = value.GetTensorTypeAndShapeInfo();
    if (info.GetShape() != part.dims)
      throw Error("Parameter data shape mismatch. Expected: " + detail::Shown(part.dims) +
                  ", Got: " + detail::Shown(info.GetShape()) + " (parameter '" + name + "')");
    if (info.GetElementType() != part.type)
      throw Error("Parameter data type mismatch. Expected: " + detail::TypeName(part.type) +
                  ", Got: " + detail::TypeName(info.GetElementType()) + " (parameter '" + name + "')");
    if (part.bytes > 0) std::memcpy(At(part.offset), value.GetTensorRawData(), static_cast<size_t>(part.bytes));
  }

  /// How many updates were made.
  int64_t OptimizerSteps() const { return Counter("optimizer_step"); }

  /// The seed of dropout and other random numbers.
  int64_t Seed() const { return Counter("random_seed"); }
  void SetSeed(int64_t seed) { SetCounter("random_seed", seed); }

 private:
  friend class Module;
  friend class Optimizer;
  friend class LinearLRScheduler;

  CheckpointState() = default;

  uint64_t ReadHeader(const uint8_t* header, uint64_t size, const std::filesystem::path& path) {
    if (std::memcmp(header, detail::kMagic.data(), detail::kMagic.size()) != 0)
      throw CheckpointError(path, "this is not a state file of a portable step");
    uint32_t version = 0, flags = 0;
    uint64_t text = 0;
    std::memcpy(&version, header + 8, 4);
    std::memcpy(&flags, header + 12, 4);
    std::memcpy(&end_, header + 16, 8);
    std::memcpy(&text, header + 24, 8);
    nominal_ = flags == 1;
    if (version != 1 || flags > 1)
      throw CheckpointError(path, "written by a newer Onward (version " + std::to_string(version) +
                                      "); update to read it");
    if (text > detail::kMostText || end_ % detail::kAlignment != 0 || end_ < detail::kHeader || end_ > size ||
        size - end_ != text + detail::kDigest)
      throw CheckpointError(path, "the file is damaged: its header does not fit its size of " +
                                      std::to_string(size) + " bytes");
    return text;
  }

  void Finish(const std::string& text, const std::array<uint8_t, detail::kDigest>& expected,
              const std::filesystem::path& path) {
    detail::Sha256 sha;
    sha.Update(memory_.get(), static_cast<size_t>(end_));
    sha.Update(text.data(), text.size());
    if (sha.Finish() != expected)
      throw CheckpointError(path, "the file is damaged: its content does not match its checksum");
    try {
      ReadText(text);
    } catch (const CheckpointError&) {
      throw;
    } catch (const std::exception& error) {
      throw CheckpointError(path, std::string("its table is not one of a state: ") + error.what());
    }
    detail::Sha256 table;
    table.Update(layout_.text.data(), layout_.text.size());
    auto digest = table.Finish();
    const auto expected_digest = nominal_ ? std::array<uint8_t, detail::kDigest>{} : digest;
    if ((nominal_ ? detail::kHeader : layout_.end) != end_ ||
        std::memcmp(expected_digest.data(), memory_.get() + 32, expected_digest.size()) != 0)
      throw CheckpointError(path, "its table does not fit its header");
    if (nominal_) MakeRoom(digest);
  }

  /// Memory for the values that will come, with the header that the state has then.
  void MakeRoom(const std::array<uint8_t, detail::kDigest>& digest) {
    const uint32_t version = 1;
    end_ = layout_.end;
    memory_ = detail::Allocate(end_);
    std::memcpy(memory_.get(), detail::kMagic.data(), detail::kMagic.size());
    std::memcpy(memory_.get() + 8, &version, sizeof(version));
    std::memcpy(memory_.get() + 16, &end_, sizeof(end_));
    std::memcpy(memory_.get() + 32, digest.data(), digest.size());
  }

  void RequireValues() const {
    if (nominal_) throw Error("The state is nominal: its parameters have no values. Please load the model parameters first.");
  }

  void ReadText(const std::string& text) {
    if (text.empty() || text.back() != '\n') throw Error("the last line has no end");
    if (!detail::IsUtf8(text)) throw Error("it is not UTF-8");
    bool table = true;
    for (const auto& line : detail::Split(std::string_view(text).substr(0, text.size() - 1), '\n')) {
      const bool property = line.rfind("property\t", 0) == 0;
      if (!property && line.rfind("extra\t", 0) != 0) {
        if (!table) throw Error("the table goes on after its end");
        layout_.Add(line);
        continue;
      }
      table = false;
      auto fields = detail::Split(line, '\t');
      if (fields.size() != 3) throw Error("a value has " + std::to_string(fields.size()) + " fields");
      const std::string name = detail::Unescape(fields[1]), value = detail::Unescape(fields[2]);
      if (name.empty()) throw Error("a value has no name");
      Property known = ReadValue(value);
      if (property)
        properties_[name] = std::move(known);
      else
        extras_[name] = value;  // kept as it is
    }
    layout_.Check();
  }

  static Property ReadValue(const std::string& value) {
    const std::string body = value.size() < 2 ? "" : value.substr(2);
    if (value.rfind("s:", 0) == 0) return body;
    if (value.rfind("f:", 0) == 0) return ReadDecimal(body);
    if (value.rfind("i:", 0) == 0) {
      size_t used = 0;
      try {
        const Property number = static_cast<int64_t>(std::stoll(body, &used));
        if (used == body.size()) return number;
      } catch (const std::logic_error&) {  // no number, or one of more than 64 bits
      }
    }
    throw Error("'" + value + "' is not a value");
  }

  /// A number with a decimal point, whatever the program's locale writes.
  static double ReadDecimal(const std::string& text) {
    if (text == "nan") return std::numeric_limits<double>::quiet_NaN();
    if (text == "inf") return std::numeric_limits<double>::infinity();
    if (text == "-inf") return -std::numeric_limits<double>::infinity();
    std::istringstream stream(text);
    stream.imbue(std::locale::classic());
    double number = 0;
    if (!(stream >> number) || !stream.eof()) throw Error("'" + text + "' is not a number");
    return number;
  }

  static std::string Spell(const Property& value) {
    if (const auto* text = std::get_if<std::string>(&value)) return "s:" + *text;
    if (const auto* number = std::get_if<int64_t>(&value)) return "i:" + std::to_string(*number);
    return "f:" + Decimal(std::get<double>(value));
  }

  /// The shortest decimal that reads back as the same number.
  static std::string Decimal(double number) {
    if (std::isnan(number)) return "nan";
    if (std::isinf(number)) return number > 0 ? "inf" : "-inf";
    for (int digits = 15;; ++digits) {
      std::ostringstream text;
      text.imbue(std::locale::classic());
      text.precision(digits);
      text << number;
      if (digits == 17 || ReadDecimal(text.str()) == number) return text.str();
    }
  }

  void Write(const std::filesystem::path& path, bool everything) const {
    RequireValues();
    std::string text = layout_.text;
    for (const auto& [name, value] : properties_)
      text += "property\t" + detail::Escape(name) + "\t" + detail::Escape(Spell(value)) + "\n";
    if (everything)
      for (const auto& [name, value] : extras_)
        text += "extra\t" + detail::Escape(name) + "\t" + detail::Escape(value) + "\n";
    std::array<uint8_t, detail::kHeader> header{};
    const uint64_t text_size = text.size();
    std::memcpy(header.data(), memory_.get(), header.size());
    std::memcpy(header.data() + 24, &text_size, 8);
    detail::ReplaceFile(path, [&](std::FILE* file) {
      detail::Sha256 sha;
      const auto write = [&](const void* data, uint64_t size) {
        sha.Update(data, static_cast<size_t>(size));
        detail::WriteAll(file, data, static_cast<size_t>(size), path);
      };
      write(header.data(), header.size());
      write(At(header.size()), (everything ? layout_.end : layout_.weights_end) - header.size());
      if (!everything) {
        const std::vector<uint8_t> zeros(1 << 16);
        for (uint64_t left = layout_.end - layout_.weights_end; left > 0;) {
          const uint64_t piece = std::min<uint64_t>(left, zeros.size());
          write(zeros.data(), piece);
          left -= piece;
        }
      }
      write(text.data(), text.size());
      const auto digest = sha.Finish();
      detail::WriteAll(file, digest.data(), digest.size(), path);
    });
  }

  const detail::Part& Require(const std::string& name) const {
    const detail::Part* part = layout_.Find(name);
    if (part == nullptr) throw Error("Parameter " + name + " not found.");
    return *part;
  }

  /// Where a byte of the file lies in memory.
  uint8_t* At(uint64_t offset) const { return memory_.get() + offset; }

  int64_t Counter(std::string_view name) const {
    int64_t value = 0;
    std::memcpy(&value, At(layout_.Counter(name).offset), sizeof(value));
    return value;
  }

  void SetCounter(std::string_view name, int64_t value) {
    std::memcpy(At(layout_.Counter(name).offset), &value, sizeof(value));
  }

  detail::Layout layout_;
  detail::Memory memory_;
  uint64_t end_ = 0;
  bool taken_ = false, nominal_ = false;
  std::map<std::string, Property> properties_;
  std::map<std::string, std::string> extras_;
};

// ======================================================================================================

/// What to do about a step whose loss or gradient is not finite: the state stays as it was in any case.
enum class OnNonFinite { kThrow, kSkip };

/// A model that trains: computes gradients with the gradient step, and evaluates, over one state.
class Module {
 public:
  /// The state must outlive the module and stay where it is. Without `inference_model`, the one beside the step.
  Module(const Ort::Env& env, const Ort::SessionOptions& options, CheckpointState& state,
         const std::filesystem::path& gradient_step, const std::optional<std::filesystem::path>& eval_model = {},
         const std::optional<std::filesystem::path>& inference_model = {})
      : env_(&env), options_(options.Clone()), state_(&state), eval_path_(eval_model), step_path_(gradient_step) {
    if (state.taken_) throw Error("this CheckpointState belongs to another Module; load the checkpoint once for each");
    std::tie(begin_, end_) = state.layout_.Stretch("trainable");
    // planning one block for all activations saves time where they are small, and takes more memory where not
    if (end_ - begin_ > (uint64_t{1} << 20)) options_.DisableMemPattern();
    step_.Open(env, options_, gradient_step, "training");
    CheckRole(step_, gradient_step, "gradient_step");
    inference_path_ = inference_model ? *inference_model : Sibling("inference_model.onnx");
    gradients_ = detail::Allocate(end_ - begin_);
    const auto statistics = state.layout_.Stretch("statistic");
    statistics_ = detail::Allocate(statistics.second - statistics.first);
    BindInputs(step_);
    BindOutputs(statistics.first);
    state.taken_ = true;
  }

  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;
  ~Module() { state_->taken_ = false; }

  /// One training step: the loss and the additional outputs. Gradients are added to those of the steps since
  /// `LazyResetGrad`; `Optimizer::Step` updates the parameters with them.
  std::vector<Ort::Value> TrainStep(const std::vector<Ort::Value>& inputs) {
    state_->RequireValues();
    CheckInputs(step_, inputs);
    for (size_t i = 0; i < inputs.size(); ++i) step_.feeds[step_.batch[i]] = inputs[i];
    MixSeed();
    if (reset_) ClearRows();
    if (!reset_ && !scratch_) BindScratch();
    auto& targets = reset_ ? targets_ : scratch_targets_;
    std::vector<Ort::Value> outputs;
    try {
      outputs = Run(step_, targets, made_here_, inputs);
    } catch (...) {
      if (!rows_.empty()) {  // they may have been written in part
        reset_ = true;
        ready_ = false;
        for (auto& table : rows_) table.unknown = true;
      }
      throw;
    }
    KeepRows(outputs);
    if (!reset_) AddScratch();
    reset_ = false;
    ready_ = true;
    outputs.erase(outputs.begin() + static_cast<ptrdiff_t>(results_), outputs.end());
    const double loss = Number(outputs[0]);
    const bool finite = std::isfinite(loss) && TakeStatistics();
    if (finite) {
      state_->SetCounter("train_step", state_->Counter("train_step") + 1);
    } else {
      bad_ = "the " + (std::isfinite(loss) ? std::string("batch-norm statistics are not finite") : "loss is " + Shown(loss)) +
             " at training step " + std::to_string(StepNumber());
      if (on_nonfinite == OnNonFinite::kThrow) {
        const std::string what = bad_;
        LazyResetGrad();
        throw NonFiniteError(what + "; parameters are unchanged. Check the data and lower the learning rate, or choose "
                                    "OnNonFinite::kSkip");
      }
    }
    return outputs;
  }

  /// The loss and the additional outputs of the evaluation model: dropout off, batch norm by its statistics.
  std::vector<Ort::Value> EvalStep(const std::vector<Ort::Value>& inputs) {
    OpenEval();
    state_->RequireValues();
    CheckInputs(eval_, inputs);
    for (size_t i = 0; i < inputs.size(); ++i) eval_.feeds[eval_.batch[i]] = inputs[i];
    std::vector<OrtValue*> made(eval_.outputs.size(), nullptr);
    std::vector<size_t> all(made.size());
    for (size_t i = 0; i < all.size(); ++i) all[i] = i;
    return Run(eval_, made, all, inputs);
  }

  /// Let the next training step replace the gradients instead of adding to them.
  void LazyResetGrad() {
    reset_ = true;
    ready_ = false;
    bad_.clear();
  }

  /// Write the trained model for inference: one file, chosen outputs, weights inside, nothing of training.
  void ExportModelForInferencing(const std::filesystem::path& path,
                                 const std::vector<std::string>& graph_output_names) const {
    state_->RequireValues();
    if (!eval_path_)
      throw ModelError("Eval model was not provided. Cannot export a model for inferencing: give Module the eval model.");
    if (graph_output_names.empty())
      throw ModelError("Expected a non empty vector of graph output names: a list with at least one name.");
    std::error_code ignored;
    if (std::filesystem::equivalent(path, inference_path_, ignored))
      throw ModelError("'" + path.string() + "' is what exports are made from: choose another name");
    const std::string model = Embed(detail::ReadFile(inference_path_), graph_output_names);
    detail::ReplaceFile(
        path, [&](std::FILE* file) { detail::WriteAll(file, model.data(), model.size(), path); },
        [&](const std::filesystem::path& made) {
          try {
            Ort::Session(*env_, made.c_str(), Ort::SessionOptions{});
          } catch (const Ort::Exception& error) {
            throw ModelError(std::string("onnxruntime cannot load the exported model; nothing was replaced: ") +
                             error.what());
          }
        });
  }

  /// The same, with a status in place of an error, as onnxruntime's own Module spells it.
  Status TryExportModelForInferencing(const std::filesystem::path& path,
                                      const std::vector<std::string>& graph_output_names) const {
    return Try([&] { ExportModelForInferencing(path, graph_output_names); });
  }

  /// How many numbers the parameters have.
  size_t GetParametersSize(bool trainable_only = true) const {
    size_t count = 0;
    for (const auto* part : Ordered(trainable_only)) count += static_cast<size_t>(detail::Elements(part->dims));
    return count;
  }

  /// All parameters in one float32 vector, in the order of the state.
  Ort::Value ToBuffer(bool trainable_only = true) const {
    state_->RequireValues();
    Ort::AllocatorWithDefaultOptions allocator;
    const auto size = static_cast<int64_t>(GetParametersSize(trainable_only));
    Ort::Value buffer = Ort::Value::CreateTensor<float>(allocator, &size, 1);
    auto* place = static_cast<uint8_t*>(buffer.GetTensorMutableRawData());
    for (const auto* part : Ordered(trainable_only)) {
      if (part->bytes == 0) continue;
      std::memcpy(place, state_->At(part->offset), static_cast<size_t>(part->bytes));
      place += part->bytes;
    }
    return buffer;
  }

  /// Set the parameters from a vector like the one that `ToBuffer` gives; a nominal state takes all of them.
  void FromBuffer(const Ort::Value& buffer, bool trainable_only = true) {
    if (state_->nominal_ && trainable_only)
      throw Error("For nominal checkpoint state, all parameters need to be loaded: pass trainable_only=false.");
    const auto info = buffer.GetTensorTypeAndShapeInfo();
    const size_t expected = GetParametersSize(trainable_only);
    if (info.GetElementCount() != expected)
      throw Error("Parameters buffer size incorrect. Expected:" + std::to_string(expected) +
                  ", Actual:" + std::to_string(info.GetElementCount()));
    if (info.GetElementType() != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT)
      throw Error("Parameters buffer must be float32, got " + detail::TypeName(info.GetElementType()));
    const auto* place = static_cast<const uint8_t*>(buffer.GetTensorRawData());
    for (const auto* part : Ordered(trainable_only)) {
      if (part->bytes == 0) continue;
      std::memcpy(state_->At(part->offset), place, static_cast<size_t>(part->bytes));
      place += part->bytes;
    }
    state_->nominal_ = false;
  }

  /// The names of the inputs that a training step, or an evaluation, takes, in order.
  std::vector<std::string> InputNames(bool training = true) {
    if (!training) OpenEval();
    const Graph& graph = training ? step_ : eval_;
    std::vector<std::string> names;
    for (const size_t at : graph.batch) names.push_back(graph.inputs[at]);
    return names;
  }

  /// The names of what a training step, or an evaluation, returns, the loss first.
  std::vector<std::string> OutputNames(bool training = true) {
    if (!training) {
      OpenEval();
      return eval_.outputs;
    }
    std::vector<std::string> names;
    for (size_t i = 0; i < results_; ++i) names.push_back(step_.outputs[made_here_[i]]);
    return names;
  }

  OnNonFinite on_nonfinite = OnNonFinite::kThrow;

 private:
  friend class Optimizer;
  friend class LinearLRScheduler;

  void OpenEval() {
    if (!eval_path_)
      throw ModelError("Eval model was not provided. Cannot evaluate: give Module the eval model.");
    if (!eval_.session) {
      Graph graph;
      graph.Open(*env_, options_, *eval_path_, "eval");
      eval_ = std::move(graph);
      BindInputs(eval_);
    }
  }

  struct Labels {
    size_t input;
    int64_t classes;
    std::optional<int64_t> ignored;
  };

  /// A session with the names, types and shapes of its inputs.
  struct Graph {
    std::unique_ptr<Ort::Session> session;
    std::string what;
    std::vector<std::string> inputs, outputs;
    std::vector<const char*> input_names, output_names;
    std::vector<ONNXTensorElementDataType> types;
    std::vector<std::vector<std::string>> symbols;
    std::vector<std::vector<int64_t>> dims;
    std::vector<Labels> labels;
    std::vector<size_t> batch;  // the inputs that the user gives
    std::vector<const OrtValue*> feeds;

    void Open(const Ort::Env& env, const Ort::SessionOptions& options, const std::filesystem::path& path,
              const std::string& role) {
      std::error_code problem;
      if (!std::filesystem::is_regular_file(path, problem))
        throw ModelError("no " + role + " model at '" + path.string() + "'");
      try {
        session = std::make_unique<Ort::Session>(env, path.c_str(), options);
      } catch (const Ort::Exception& error) {
        throw ModelError("onnxruntime cannot load the " + role + " model '" + path.string() + "': " + error.what());
      }
      what = role;
      Ort::AllocatorWithDefaultOptions allocator;
      for (size_t i = 0; i < session->GetInputCount(); ++i) {
        inputs.emplace_back(session->GetInputNameAllocated(i, allocator).get());
        const auto type = session->GetInputTypeInfo(i);
        if (type.GetONNXType() != ONNX_TYPE_TENSOR)
          throw ModelError("the input '" + inputs.back() + "' of '" + path.string() + "' is not a tensor");
        const auto info = type.GetTensorTypeAndShapeInfo();
        types.push_back(info.GetElementType());
        dims.push_back(info.GetShape());
        const auto names = info.GetSymbolicDimensions();
        symbols.emplace_back();
        for (const char* name : names) symbols.back().emplace_back(name == nullptr ? "" : name);
      }
      for (size_t i = 0; i < session->GetOutputCount(); ++i)
        outputs.emplace_back(session->GetOutputNameAllocated(i, allocator).get());
    }

    void Name() {  // once it is where it stays
      input_names.clear();
      output_names.clear();
      for (const auto& name : inputs) input_names.push_back(name.c_str());
      for (const auto& name : outputs) output_names.push_back(name.c_str());
    }

    std::string About(const char* key) const {
      Ort::AllocatorWithDefaultOptions allocator;
      const auto found = session->GetModelMetadata().LookupCustomMetadataMapAllocated(key, allocator);
      return found ? found.get() : "";
    }
  };

  /// A table of gradients of which a step writes some rows, in place; they are cleared before the next step.
  struct Rows {
    const detail::Part* part;
    std::string output;
    size_t place = 0;  // among what a step makes new
    bool unknown = false;
    std::vector<int64_t> written{};
  };

  void CheckRole(const Graph& graph, const std::filesystem::path& path, const std::string& role) const {
    const std::string version = graph.About("onward.portable");
    if (version.empty() || graph.About("onward.role") != role)
      throw ModelError("'" + path.string() + "' is no " + role + " of Onward: make it with onward artifacts "
                       "--portable, which writes " + role + ".onnx");
    if (version != "2")
      throw ModelError("'" + path.string() + "' is of version " + version + " of the portable step, this library "
                       "trains version 2: write the artifacts again, or update");
    if (graph.About("onward.state_digest") != detail::Hex(state_->memory_.get() + 32, detail::kDigest))
      throw Error("the checkpoint is the state of another model than '" + path.string() +
                  "': do they belong together?");
  }

  std::vector<Labels> ReadLabels(const Graph& graph) const {
    std::vector<Labels> found;
    for (const auto& line : detail::Split(step_.About("onward.label_ranges"), '\n')) {
      const auto fields = detail::Split(line, '\t');
      const auto input = std::find(graph.inputs.begin(), graph.inputs.end(), fields[0]);
      if (fields.size() != 3 || input == graph.inputs.end()) continue;
      Labels labels{static_cast<size_t>(input - graph.inputs.begin()), std::stoll(fields[1]), {}};
      if (!fields[2].empty()) labels.ignored = std::stoll(fields[2]);
      found.push_back(labels);
    }
    return found;
  }

  static bool TakeSuffix(std::string& name, std::string_view suffix) {
    if (name.size() <= suffix.size() || name.compare(name.size() - suffix.size(), suffix.size(), suffix) != 0)
      return false;
    name.resize(name.size() - suffix.size());
    return true;
  }

  const OrtValue* View(uint8_t* place, const detail::Part& part) {
    tensors_.push_back(Ort::Value::CreateTensor(host_, place, static_cast<size_t>(part.bytes), part.dims.data(),
                                                part.dims.size(), part.type));
    return tensors_.back();
  }

  uint8_t* GradientAt(const detail::Part& part, const detail::Memory& memory) const {
    return memory.get() + (part.offset - begin_);
  }

  const detail::Part* Trainable(const std::string& name) const {
    const detail::Part* part = state_->layout_.Find(name);
    return part != nullptr && part->role == "trainable" ? part : nullptr;
  }

  /// Tensors over the state for each input that is a parameter; the others are the batch.
  void BindInputs(Graph& graph) {
    graph.Name();
    for (size_t i = 0; i < graph.inputs.size(); ++i) {
      std::string name = graph.inputs[i];
      const detail::Part* part = state_->layout_.Find(name);
      graph.feeds.push_back(nullptr);
      if (part != nullptr) {
        if (part->dims != graph.dims[i] || part->type != graph.types[i])
          throw ModelError("the " + graph.what + " model reads parameter '" + part->name + "' of shape " +
                           detail::Shown(graph.dims[i]) + ", the state has " + detail::Shown(part->dims) +
                           ": do they belong together?");
        graph.feeds.back() = View(state_->At(part->offset), *part);
      } else if (&graph == &step_ && name == "random_seed") {
        const int64_t one = 1;
        seed_value_ = Ort::Value::CreateTensor<int64_t>(host_, &seed_, 1, &one, 1);
        graph.feeds.back() = seed_value_;
      } else if (&graph == &step_ && TakeSuffix(name, "_grad.accumulation.buffer") && Trainable(name) != nullptr) {
        part = Trainable(name);
        graph.feeds.back() = View(GradientAt(*part, gradients_), *part);
      } else {
        graph.batch.push_back(i);
      }
    }
    graph.labels = ReadLabels(graph);
  }

  /// Where each output goes: gradients and statistics into memory of ours, what is left is made new by each step.
  void BindOutputs(uint64_t statistics) {
    std::set<std::string> rows;
    for (const auto& line : detail::Split(step_.About("onward.rows"), '\n')) {
      const auto fields = detail::Split(line, '\t');
      if (fields.size() != 2) continue;
      const detail::Part* part = Trainable(detail::Unescape(fields[0]));
      if (part == nullptr || part->dims.empty()) throw ModelError("the gradient step names rows of an unknown table");
      rows_.push_back({part, detail::Unescape(fields[1])});
      rows.insert(rows_.back().output);
    }
    targets_.assign(step_.outputs.size(), nullptr);
    std::vector<size_t> row_outputs;
    std::set<std::string> found;
    for (size_t i = 0; i < step_.outputs.size(); ++i) {
      std::string name = step_.outputs[i];
      if (rows.count(name)) {
        row_outputs.push_back(i);
      } else if (TakeSuffix(name, "_grad.accumulation.out") && Trainable(name) != nullptr) {
        const detail::Part& part = *Trainable(name);
        targets_[i] = const_cast<OrtValue*>(View(GradientAt(part, gradients_), part));
        found.insert(name);
      } else if (name = step_.outputs[i]; TakeSuffix(name, ".next") && state_->layout_.Find(name) != nullptr &&
                                          state_->layout_.Find(name)->role == "statistic") {
        const detail::Part& part = *state_->layout_.Find(name);
        uint8_t* place = statistics_.get() + (part.offset - statistics);
        targets_[i] = const_cast<OrtValue*>(View(place, part));
        next_statistics_.push_back({&part, place});
      } else {
        made_here_.push_back(i);
      }
    }
    results_ = made_here_.size();
    if (results_ == 0 || found.size() != state_->ParameterNames(true).size())
      throw ModelError("the gradient step lacks the loss, or the gradient of a parameter");
    for (const size_t output : row_outputs) {
      for (auto& table : rows_)
        if (table.output == step_.outputs[output]) table.place = made_here_.size();
      made_here_.push_back(output);
    }
  }

  bool IsTable(const detail::Part& part) const {
    return std::any_of(rows_.begin(), rows_.end(), [&](const Rows& table) { return table.part == &part; });
  }

  /// Memory for the gradients of a step that are to be added to others.
  void BindScratch() {
    scratch_ = detail::Allocate(end_ - begin_);
    scratch_targets_ = targets_;
    for (size_t i = 0; i < step_.outputs.size(); ++i) {
      std::string name = step_.outputs[i];
      if (!TakeSuffix(name, "_grad.accumulation.out") || Trainable(name) == nullptr) continue;
      const detail::Part& part = *Trainable(name);
      if (!IsTable(part)) scratch_targets_[i] = const_cast<OrtValue*>(View(GradientAt(part, scratch_), part));
    }
  }

  void AddScratch() {
    for (const auto& part : state_->layout_.parts) {
      if (part.role != "trainable" || IsTable(part)) continue;
      auto* sum = reinterpret_cast<float*>(GradientAt(part, gradients_));
      const auto* more = reinterpret_cast<const float*>(GradientAt(part, scratch_));
      for (size_t i = 0; i < part.bytes / sizeof(float); ++i) sum[i] += more[i];
    }
  }

  void ClearRows() {
    for (auto& table : rows_) {
      const auto bytes = static_cast<size_t>(table.part->bytes);
      const size_t width = bytes / static_cast<size_t>(std::max<int64_t>(table.part->dims[0], 1));
      uint8_t* place = GradientAt(*table.part, gradients_);
      if (table.unknown) std::memset(place, 0, bytes);
      for (const int64_t row : table.written)
        std::memset(place + static_cast<size_t>(row < 0 ? row + table.part->dims[0] : row) * width, 0, width);
      table.written.clear();
      table.unknown = false;
    }
  }

  /// Unmark the pieces of the gradients, of so many numbers, that lie within a table and have no row of a step in them.
  void MarkRows(std::vector<uint8_t>& pieces, size_t size) const {
    for (const auto& table : rows_) {
      const size_t begin = static_cast<size_t>(table.part->offset - begin_) / sizeof(float);
      const size_t end = begin + static_cast<size_t>(table.part->bytes) / sizeof(float);
      const auto count = static_cast<size_t>(std::max<int64_t>(table.part->dims[0], 1));
      const size_t width = (end - begin) / count, first = (begin + size - 1) / size, last = end / size;
      if (table.unknown || width == 0 || first >= last) continue;
      std::fill(pieces.begin() + static_cast<ptrdiff_t>(first), pieces.begin() + static_cast<ptrdiff_t>(last), uint8_t{0});
      for (const int64_t row : table.written) {
        const size_t at = begin + (static_cast<size_t>(row < 0 ? row + table.part->dims[0] : row)) * width;
        for (size_t piece = at / size; piece <= (at + width - 1) / size; ++piece) pieces[piece] = 1;
      }
    }
  }

  void KeepRows(const std::vector<Ort::Value>& outputs) {
    for (auto& table : rows_) {
      const Ort::Value& rows = outputs[table.place];
      const auto info = rows.GetTensorTypeAndShapeInfo();
      const size_t count = info.GetElementCount();
      if (info.GetElementType() == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64)
        table.written.insert(table.written.end(), rows.GetTensorData<int64_t>(), rows.GetTensorData<int64_t>() + count);
      else if (info.GetElementType() == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32)
        table.written.insert(table.written.end(), rows.GetTensorData<int32_t>(), rows.GetTensorData<int32_t>() + count);
      else
        table.unknown = true;
    }
  }

  /// Make the statistics of the last step those of the state; false, with nothing changed, where they are not finite.
  bool TakeStatistics() {
    for (const auto& [part, place] : next_statistics_) {
      if (part->type != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) continue;
      const auto* numbers = reinterpret_cast<const float*>(place);
      for (size_t i = 0; i < part->bytes / sizeof(float); ++i)
        if (!std::isfinite(numbers[i])) return false;
    }
    for (const auto& [part, place] : next_statistics_)
      std::memcpy(state_->At(part->offset), place, static_cast<size_t>(part->bytes));
    return true;
  }

  /// The seed of this step, as Python's Module computes it.
  void MixSeed() {
    const auto seed = static_cast<uint64_t>(state_->Counter("random_seed"));
    seed_ = static_cast<int64_t>(seed * 0x9E3779B97F4A7C15u + static_cast<uint64_t>(StepNumber()) * 0xD1B54A32D192ED03u);
  }

  /// What is wrong with a batch, said in one sentence; onnxruntime would say it late, or not at all.
  void CheckInputs(const Graph& graph, const std::vector<Ort::Value>& given) const {
    const size_t count = graph.batch.size();
    if (given.size() != count) {
      std::string names;
      for (size_t i = 0; i < count; ++i) names += (i ? ", " : "") + graph.inputs[graph.batch[i]];
      throw Error("the model takes " + std::to_string(count) + " inputs (" + names + "), got " +
                  std::to_string(given.size()));
    }
    for (size_t i = 0; i < count; ++i) {
      const size_t at = graph.batch[i];
      if (!given[i] || !given[i].IsTensor()) throw Error("input '" + graph.inputs[at] + "' is not a tensor");
      const auto type = given[i].GetTensorTypeAndShapeInfo().GetElementType();
      if (type != graph.types[at])
        throw Error("input '" + graph.inputs[at] + "' is " + detail::TypeName(type) + ", the model takes " +
                    detail::TypeName(graph.types[at]));
    }
    for (size_t i = 0; i < count; ++i) CheckShape(graph, graph.batch[i], given[i].GetTensorTypeAndShapeInfo().GetShape());
    for (const auto& labels : graph.labels) CheckLabels(graph, labels, given);
  }

  static void CheckShape(const Graph& graph, size_t at, const std::vector<int64_t>& shape) {
    const auto& wanted = graph.dims[at];
    if (wanted.empty()) return;  // a scalar, or of any rank
    bool fits = shape.size() == wanted.size();
    for (size_t i = 0; fits && i < shape.size(); ++i) fits = wanted[i] < 0 || wanted[i] == shape[i];
    if (fits) return;
    std::string taken;
    for (size_t i = 0; i < wanted.size(); ++i) {
      const std::string& symbol = graph.symbols[at][i];
      taken += (i ? ", " : "") + (wanted[i] >= 0 ? std::to_string(wanted[i]) : symbol.empty() ? "any" : symbol);
    }
    throw Error("input '" + graph.inputs[at] + "' has shape " + detail::Shown(shape) + ", the model takes [" + taken + "]");
  }

  void CheckLabels(const Graph& graph, const Labels& labels, const std::vector<Ort::Value>& given) const {
    size_t index = 0;
    while (index < given.size() && graph.batch[index] != labels.input) ++index;
    if (index == given.size()) return;
    const auto shape = given[index].GetTensorTypeAndShapeInfo().GetShape();
    for (size_t other = 0; other < given.size(); ++other) {
      const size_t at = graph.batch[other];
      if (at == labels.input) continue;
      const auto beside = given[other].GetTensorTypeAndShapeInfo().GetShape();
      for (size_t i = 0; i < std::min(shape.size(), graph.symbols[labels.input].size()); ++i)
        for (size_t j = 0; j < std::min(beside.size(), graph.symbols[at].size()); ++j)
          if (!graph.symbols[at][j].empty() && graph.symbols[at][j] == graph.symbols[labels.input][i] &&
              beside[j] != shape[i])
            throw Error("'" + graph.inputs[at] + "' " + detail::Shown(beside) + " and '" +
                        graph.inputs[labels.input] + "' " + detail::Shown(shape) +
                        " belong together: axis " + std::to_string(j) + " of the one and axis " +
                        std::to_string(i) + " of the other must have the same size");
    }
    const auto info = given[index].GetTensorTypeAndShapeInfo();
    const auto check = [&](const auto* numbers) {
      for (size_t i = 0; i < info.GetElementCount(); ++i) {
        const auto label = static_cast<int64_t>(numbers[i]);
        if ((label >= 0 && label < labels.classes) || (labels.ignored && label == *labels.ignored)) continue;
        const std::string hint =
            labels.ignored ? " (or " + std::to_string(*labels.ignored) + ", which is ignored)" : "";
        throw Error("'" + graph.inputs[labels.input] + "' has label " + std::to_string(label) + " at position " +
                    std::to_string(i) + ": the model has " + std::to_string(labels.classes) +
                    " classes, so labels are 0 to " + std::to_string(labels.classes - 1) + hint);
      }
    };
    if (info.GetElementType() == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64) check(given[index].GetTensorData<int64_t>());
    if (info.GetElementType() == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32) check(given[index].GetTensorData<int32_t>());
  }

  /// Run a graph: the outputs named by `fresh` are made new and given back, the others lie in their places.
  static std::vector<Ort::Value> Run(const Graph& graph, std::vector<OrtValue*>& made, const std::vector<size_t>& fresh,
                                     const std::vector<Ort::Value>& given) {
    for (const size_t at : fresh) made[at] = nullptr;
    OrtStatus* status =
        Ort::GetApi().Run(*graph.session, nullptr, graph.input_names.data(), graph.feeds.data(), graph.feeds.size(),
                          graph.output_names.data(), made.size(), made.data());
    std::vector<Ort::Value> results;
    for (const size_t at : fresh) {
      results.emplace_back(made[at]);
      made[at] = nullptr;
    }
    if (status != nullptr) {
      std::string shapes;
      for (size_t i = 0; i < given.size(); ++i)
        shapes += (i ? ", " : "") + graph.inputs[graph.batch[i]] + " " +
                  detail::Shown(given[i].GetTensorTypeAndShapeInfo().GetShape());
      const Ort::Status owned(status);
      throw Error("the step failed on inputs " + shapes + ": " + owned.GetErrorMessage());
    }
    return results;
  }

  static double Number(const Ort::Value& loss) {
    const auto type = loss.GetTensorTypeAndShapeInfo().GetElementType();
    if (type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) return *loss.GetTensorData<float>();
    if (type == ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE) return *loss.GetTensorData<double>();
    if (type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16)
      return static_cast<double>(loss.GetTensorData<Ort::Float16_t>()->ToFloat());
    return 0.0;
  }

  static std::string Shown(double loss) { return std::isnan(loss) ? "nan" : loss > 0 ? "inf" : "-inf"; }

  int64_t StepNumber() const { return state_->Counter("train_step") + 1; }

  std::vector<const detail::Part*> Ordered(bool trainable_only) const {
    std::vector<const detail::Part*> parts;
    for (const auto& name : state_->ParameterNames(trainable_only)) {
      parts.push_back(&state_->Require(name));
      if (parts.back()->type != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT)
        throw Error("parameter '" + name + "' is " + detail::TypeName(parts.back()->type) +
                    ": only float32 can be in one vector");
    }
    return parts;
  }

  /// Another file of the same artifacts: in the same folder, with the same prefix.
  std::filesystem::path Sibling(const std::string& name) const {
    const std::string own = step_path_.filename().string();
    const size_t at = own.find("gradient_step");
    return step_path_.parent_path() / (at == std::string::npos ? name : own.substr(0, at) + name);
  }

  // ---- the inference model as one file: protobuf's wire format, no more of it than is needed --------------

  struct Field {
    uint64_t key = 0;
    std::string_view whole, body;  // with and without its head
    uint64_t number() const { return key >> 3; }
  };

  static uint64_t TakeVarint(std::string_view& text) {
    uint64_t value = 0;
    for (int shift = 0; shift < 64 && !text.empty(); shift += 7) {
      const auto byte = static_cast<uint8_t>(text.front());
      text.remove_prefix(1);
      value |= uint64_t{byte & 0x7fu} << shift;
      if (byte < 0x80) return value;
    }
    throw ModelError("the inference model is damaged");
  }

  static std::vector<Field> Fields(std::string_view text) {
    std::vector<Field> fields;
    while (!text.empty()) {
      const std::string_view start = text;
      Field field;
      field.key = TakeVarint(text);
      uint64_t size = 0;
      switch (field.key & 7) {
        case 0: {
          const std::string_view number = text;
          TakeVarint(text);
          field.body = number.substr(0, number.size() - text.size());
          break;
        }
        case 1: size = 8; break;
        case 2: size = TakeVarint(text); break;
        case 5: size = 4; break;
        default: throw ModelError("the inference model is damaged");
      }
      if (size > text.size()) throw ModelError("the inference model is damaged");
      if ((field.key & 7) != 0) {
        field.body = text.substr(0, static_cast<size_t>(size));
        text.remove_prefix(static_cast<size_t>(size));
      }
      field.whole = start.substr(0, start.size() - text.size());
      fields.push_back(field);
    }
    return fields;
  }

  static void PutVarint(std::string& text, uint64_t value) {
    for (; value > 0x7f; value >>= 7) text += static_cast<char>((value & 0x7f) | 0x80);
    text += static_cast<char>(value);
  }

  static void PutBytes(std::string& text, uint64_t number, std::string_view body) {
    PutVarint(text, number << 3 | 2);
    PutVarint(text, body.size());
    text += body;
  }

  static std::string Name(std::string_view message, uint64_t number) {
    for (const auto& field : Fields(message))
      if (field.number() == number) return std::string(field.body);
    return "";
  }

  std::string Embed(const std::string& model, const std::vector<std::string>& outputs) const {
    // ModelProto: graph 7, metadata_props 14; GraphProto: initializer 5, output 12
    std::string made, digest;
    const auto fields = Fields(model);
    for (const auto& field : fields)
      if (field.number() == 14 && Name(field.body, 1) == "onward.state_digest") digest = Name(field.body, 2);
    if (digest != detail::Hex(state_->memory_.get() + 32, detail::kDigest))
      throw ModelError("'" + inference_path_.string() + "' is the inference model of another state: do they belong "
                       "together?");
    for (const auto& field : fields) {
      if (field.number() != 7) {
        made += field.whole;
        continue;
      }
      std::string graph;
      std::map<std::string, std::string_view> known;
      for (const auto& inner : Fields(field.body)) {
        if (inner.number() == 12)
          known[Name(inner.body, 1)] = inner.body;
        else if (inner.number() == 5)
          PutBytes(graph, 5, EmbedTensor(inner.body));
        else
          graph += inner.whole;
      }
      for (const auto& name : outputs) {
        const auto found = known.find(name);
        if (found == known.end())
          throw ModelError("Expected graph output for inference graph " + name +
                           " could not be found. Please regenerate the eval graph.");
        PutBytes(graph, 12, found->second);
      }
      PutBytes(made, 7, graph);
    }
    if (made.size() >= (uint64_t{1} << 31))
      throw ModelError("one file would take more than 2 GB, which ONNX cannot hold: copy the inference model and "
                       "write its weights beside it (CheckpointState::SaveWeights)");
    return made;
  }

  /// TensorProto with raw_data (9) where it had external_data (13) and data_location (14).
  std::string EmbedTensor(std::string_view tensor) const {
    std::string kept, name;
    bool external = false;
    for (const auto& field : Fields(tensor)) {
      if (field.number() == 8) name = std::string(field.body);
      if (field.number() == 13) external = true;
      if (field.number() != 13 && field.number() != 14) kept += field.whole;
    }
    if (!external) return std::string(tensor);
    const detail::Part* part = state_->layout_.Find(name);
    if (part == nullptr)
      throw ModelError("'" + name + "' of the inference model lies in a file of its own: copy the model with its files "
                       "and write the weights beside it (CheckpointState::SaveWeights)");
    PutBytes(kept, 9, {reinterpret_cast<const char*>(state_->At(part->offset)), static_cast<size_t>(part->bytes)});
    return kept;
  }

  const Ort::Env* env_;
  Ort::SessionOptions options_;
  Ort::MemoryInfo host_ = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  CheckpointState* state_;
  std::optional<std::filesystem::path> eval_path_;
  std::filesystem::path step_path_, inference_path_;
  Graph step_, eval_;
  uint64_t begin_ = 0, end_ = 0;  // the trainable parameters in the state
  detail::Memory gradients_, scratch_, statistics_;
  std::deque<Ort::Value> tensors_;
  std::vector<OrtValue*> targets_, scratch_targets_;
  std::vector<size_t> made_here_;
  size_t results_ = 0;
  std::vector<Rows> rows_;
  std::vector<std::pair<const detail::Part*, uint8_t*>> next_statistics_;
  int64_t seed_ = 0;
  Ort::Value seed_value_{nullptr};
  bool reset_ = true, ready_ = false;
  std::string bad_;  // what was not finite since the last update
};

// ======================================================================================================

/// Updates the parameters of a module from its gradients, in place.
class Optimizer {
 public:
  /// Goes on with the learning rate of the checkpoint, or 0.001. Without `update_step`, the one beside the gradient step.
  explicit Optimizer(Module& module, const std::optional<std::filesystem::path>& update_step = {})
      : module_(&module), state_(module.state_) {
    const auto path = update_step ? *update_step : module.Sibling("update_step.onnx");
    graph_.Open(*module.env_, module.options_, path, "optimizer");
    module.CheckRole(graph_, path, "update_step");
    graph_.Name();
    count_ = static_cast<size_t>(module.end_ - module.begin_) / sizeof(float);
    Read(path);
    const auto found = state_->extras_.find("learning_rate");
    SetLearningRate(found == state_->extras_.end() ? 1e-3 : CheckpointState::ReadDecimal(found->second.substr(2)));
  }

  /// Update the parameters by the gradients; false where they were not finite and the update was skipped.
  bool Step() {
    Module& module = *module_;
    if (!module.ready_) throw Error("there is nothing to update from: call TrainStep before Optimizer::Step");
    const double square = Look();
    const double norm = std::sqrt(square);
    std::string what = module.bad_;
    if (what.empty() && !(norm < 1e30))
      what = "the gradient is not finite at training step " + std::to_string(module.StepNumber() - 1);
    if (!what.empty()) {
      module.LazyResetGrad();
      if (module.on_nonfinite == OnNonFinite::kThrow)
        throw NonFiniteError(what + "; parameters are unchanged. Check the data and lower the learning rate, or choose "
                                    "OnNonFinite::kSkip");
      if (++skipped_ >= 10) throw NonFiniteError("10 updates in a row were skipped; the last one because " + what);
      return false;
    }
    skipped_ = 0;
    scale_ = clip_norm_ ? static_cast<float>(std::min(*clip_norm_ / (norm + 1e-6), 1.0)) : 1.0f;
    step_ = state_->OptimizerSteps() + 1;
    if (elementwise_)
      UpdatePieces();
    else
      UpdateWhole();
    state_->SetCounter("optimizer_step", step_);
    module.ready_ = false;
    return true;
  }

  /// Set the learning rate of the following updates.
  void SetLearningRate(double rate) {
    if (!std::isfinite(rate)) throw Error("the learning rate is not a finite number");
    rate_ = rate;
    single_ = static_cast<float>(rate);
    for (auto& setting : settings_) setting->rate = static_cast<float>(rate * setting->scale);
    state_->extras_["learning_rate"] = CheckpointState::Spell(rate);
  }

  /// The learning rate of the next update.
  double GetLearningRate() const { return rate_; }

 private:
  friend class LinearLRScheduler;

  // Numbers that are left alone together, and the most that one run updates: few enough to stay in the caches.
  static constexpr size_t kPiece = 1 << 13, kLeast = 1 << 16, kMost = 1 << 18;

  /// What a group of parameters has of its own.
  struct Setting {
    double scale = 1;
    float decay = 0, rate = 0;
    bool rests = false;  // what has no gradient and no state is not changed
    Ort::Value rate_value{nullptr}, decay_value{nullptr};
  };

  struct Run {
    size_t begin, end;
    Setting* setting;
  };

  struct Bound {
    std::vector<Ort::Value> values;
    std::vector<const OrtValue*> feeds;
    std::vector<OrtValue*> targets;
  };

  void Read(const std::filesystem::path& path) {
    std::vector<std::array<std::string, 3>> parameters;
    std::string form;
    for (const auto& line : detail::Split(graph_.About("onward.update"), '\n')) {
      auto fields = detail::Split(line, '\t');
      for (auto& field : fields) field = detail::Unescape(field);
      if (fields[0] == "form" && fields.size() == 2) form = fields[1];
      if (fields[0] == "clip_norm" && fields.size() == 2) clip_norm_ = CheckpointState::ReadDecimal(fields[1]);
      if (fields[0] == "parameter" && fields.size() == 4) parameters.push_back({fields[1], fields[2], fields[3]});
    }
    if (form != "elementwise" && form != "whole")
      throw ModelError("'" + path.string() + "' has an update of an unknown form: '" + form + "'");
    elementwise_ = form == "elementwise";
    pieces_ = (count_ + kPiece - 1) / kPiece;
    step_value_ = Scalar(&step_);
    scale_value_ = Scalar(&scale_);
    rate_value_ = Scalar(&single_);
    if (!elementwise_) {
      BindWhole(path);
      return;
    }
    FindSlots(path);
    FindRuns(parameters, path);
    block_ = std::min(std::max(count_ / 8 / kPiece * kPiece, kLeast), kMost);
    awake_.assign(pieces_, 0);
    for (const auto& [name, offset] : slots_) {
      const auto* numbers = reinterpret_cast<const float*>(state_->At(offset));
      for (size_t i = 0; i < count_; ++i)
        if (numbers[i] != 0.0f) awake_[i / kPiece] = 1;
    }
    if (count_ > kLeast && Rests())
      for (auto& setting : settings_) setting->rests = setting->decay == 0.0f;
  }

  template <typename Number>
  Ort::Value Scalar(Number* place) const {
    const int64_t one = 1;
    return Ort::Value::CreateTensor<Number>(module_->host_, place, 1, &one, 1);
  }

  Ort::Value Row(float* place, size_t size) const {
    const std::array<int64_t, 2> dims = {1, static_cast<int64_t>(size)};
    return Ort::Value::CreateTensor<float>(module_->host_, place, size, dims.data(), dims.size());
  }

  /// Where the state of the optimizer begins, by slot: laid out as the parameters are.
  void FindSlots(const std::filesystem::path& path) {
    const auto& layout = state_->layout_;
    std::vector<const detail::Tensor*> trainable;
    std::map<std::string, std::vector<const detail::Tensor*>> by_slot;
    for (const auto& tensor : layout.tensors) {
      const auto& part = layout.parts[tensor.first];
      if (part.role == "trainable") trainable.push_back(&tensor);
      if (part.role == "slot") by_slot[part.slot].push_back(&tensor);
    }
    for (const auto& [name, tensors] : by_slot) {
      bool alike = tensors.size() == trainable.size();
      for (size_t i = 0; alike && i < tensors.size(); ++i)
        alike = tensors[i]->bytes == trainable[i]->bytes &&
                tensors[i]->offset - tensors[0]->offset == trainable[i]->offset - trainable[0]->offset;
      if (!alike) throw ModelError("'" + path.string() + "' does not fit the state's '" + name + "'");
      slots_[name] = tensors[0]->offset;
    }
    for (const auto& name : graph_.inputs)
      if (!slots_.count(name) && !IsKnown(name))
        throw ModelError("'" + path.string() + "' has an input that is unknown: '" + name + "'");
  }

  static bool IsKnown(const std::string& name) {
    for (const char* known : {"parameter", "gradient", "learning_rate", "step", "gradient_scale", "weight_decay"})
      if (name == known) return true;
    return false;
  }

  /// Stretches of the parameters that share their settings.
  void FindRuns(const std::vector<std::array<std::string, 3>>& parameters, const std::filesystem::path& path) {
    size_t index = 0;
    for (const auto& part : state_->layout_.parts) {
      if (part.role != "trainable") continue;
      if (index == parameters.size() || parameters[index][0] != part.name)
        throw ModelError("'" + path.string() + "' has no settings for '" + part.name + "' where they should be");
      const double scale = CheckpointState::ReadDecimal(parameters[index][1]);
      const auto decay = static_cast<float>(CheckpointState::ReadDecimal(parameters[index][2]));
      ++index;
      const auto begin = static_cast<size_t>(part.offset - module_->begin_) / sizeof(float);
      if (runs_.empty() || runs_.back().setting->scale != scale || runs_.back().setting->decay != decay) {
        if (!runs_.empty()) runs_.back().end = begin;
        runs_.push_back({begin, count_, FindSetting(scale, decay)});
      }
    }
  }

  Setting* FindSetting(double scale, float decay) {
    for (auto& setting : settings_)
      if (setting->scale == scale && setting->decay == decay) return setting.get();
    settings_.push_back(std::make_unique<Setting>());
    Setting& made = *settings_.back();
    made.scale = scale;
    made.decay = decay;
    made.rate_value = Scalar(&made.rate);
    made.decay_value = Scalar(&made.decay);
    return &made;
  }

  /// Whether the rule leaves a parameter with zero gradient, state and weight decay exactly as it is.
  bool Rests() {
    std::array<float, 9> numbers{}, zeros{};
    for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<float>(i) * 0.5f - 2.0f;
    const auto before = numbers;
    Setting setting;
    setting.rate = 0.1f;
    setting.rate_value = Scalar(&setting.rate);
    setting.decay_value = Scalar(&setting.decay);
    for (const int64_t step : {1, 2, 1000}) {
      step_ = step;
      Bound bound = Bind([&](const std::string& name) {
        float* place = name == "parameter" ? numbers.data() : zeros.data();
        return Row(place, numbers.size());
      }, setting);
      Execute(bound);
      if (numbers != before || std::any_of(zeros.begin(), zeros.end(), [](float x) { return x != 0.0f; })) return false;
    }
    return true;
  }

  /// Tensors for one run of an elementwise update; outputs lie where the inputs of their names are.
  template <typename Place>
  Bound Bind(Place&& place, const Setting& setting) {
    Bound bound;
    bound.values.reserve(graph_.inputs.size() + graph_.outputs.size());
    for (const auto& name : graph_.inputs) {
      const OrtValue* fixed = name == "learning_rate"    ? setting.rate_value
                              : name == "step"           ? static_cast<const OrtValue*>(step_value_)
                              : name == "gradient_scale" ? static_cast<const OrtValue*>(scale_value_)
                              : name == "weight_decay"   ? static_cast<const OrtValue*>(setting.decay_value)
                                                         : nullptr;
      if (fixed == nullptr) bound.values.push_back(place(name));
      bound.feeds.push_back(fixed == nullptr ? static_cast<const OrtValue*>(bound.values.back()) : fixed);
    }
    for (std::string name : graph_.outputs) {
      if (!Module::TakeSuffix(name, ".next") || (name != "parameter" && !slots_.count(name)))
        throw ModelError("the update step has an output that is unknown: '" + name + "'");
      bound.values.push_back(place(name));
      bound.targets.push_back(bound.values.back());
    }
    return bound;
  }

  void Execute(Bound& bound) {
    OrtStatus* status = Ort::GetApi().Run(*graph_.session, nullptr, graph_.input_names.data(), bound.feeds.data(),
                                          bound.feeds.size(), graph_.output_names.data(), bound.targets.size(),
                                          bound.targets.data());
    if (status != nullptr) {
      const Ort::Status owned(status);
      throw Error("the update failed, parameters may be updated in part: load the last checkpoint again. " +
                  owned.GetErrorMessage());
    }
  }

  /// Σg² of all gradients; notes which pieces have one. What no step wrote since the last reset is zero: left out.
  double Look() {
    const auto* numbers = reinterpret_cast<const float*>(module_->gradients_.get());
    written_.assign(pieces_, 1);
    module_->MarkRows(written_, kPiece);
    double total = 0;
    for (size_t piece = 0; piece < pieces_; ++piece) {
      if (!written_[piece]) continue;
      const size_t begin = piece * kPiece, size = std::min(kPiece, count_ - begin);
      const double sum = SumOfSquares(numbers + begin, size);
      if (elementwise_ && !awake_[piece] && (sum != 0.0 || HasBits(numbers + begin, size))) awake_[piece] = 1;
      total += sum;
    }
    return total;
  }

  /// In float32, which is twice as fast, or in double where that overflows.
  static double SumOfSquares(const float* numbers, size_t size) {
    const auto single = static_cast<double>(SumIn<float>(numbers, size));
    return std::isfinite(single) ? single : SumIn<double>(numbers, size);
  }

  template <typename Number>
  static Number SumIn(const float* numbers, size_t size) {
    std::array<Number, 8> sums{};
    size_t i = 0;
    for (; i + sums.size() <= size; i += sums.size())
      for (size_t lane = 0; lane < sums.size(); ++lane) {
        const auto number = static_cast<Number>(numbers[i + lane]);
        sums[lane] += number * number;
      }
    Number sum = 0;
    for (; i < size; ++i) sum += static_cast<Number>(numbers[i]) * static_cast<Number>(numbers[i]);
    for (const Number lane : sums) sum += lane;
    return sum;
  }

  /// Whether a number is other than 0, however small its square is.
  static bool HasBits(const float* numbers, size_t size) {
    uint32_t bits = 0;
    for (size_t i = 0; i < size; ++i) {
      uint32_t own = 0;
      std::memcpy(&own, numbers + i, sizeof(own));
      bits |= own;
    }
    return bits != 0;
  }

  void UpdatePieces() {
    for (const Run& run : runs_) {
      for (size_t begin = run.begin; begin < run.end;) {
        const auto piece_end = [&](size_t at) { return std::min((at / kPiece + 1) * kPiece, run.end); };
        const auto moves = [&](size_t at) { return !run.setting->rests || awake_[at / kPiece]; };
        size_t end = piece_end(begin);
        if (moves(begin)) {
          while (end < run.end && end - begin < block_ && moves(end)) end = piece_end(end);
          Update(begin, end, *run.setting);
        }
        begin = end;
      }
    }
  }

  void Update(size_t begin, size_t end, const Setting& setting) {
    auto found = bound_.find({begin, end});
    if (found == bound_.end()) {
      if (bound_.size() > 4096) bound_.clear();  // stretches change while pieces wake
      const auto place = [&](const std::string& name) {
        auto* start = reinterpret_cast<float*>(name == "gradient"    ? module_->gradients_.get()
                                               : name == "parameter" ? state_->At(module_->begin_)
                                                                     : state_->At(slots_.at(name)));
        return Row(start + begin, end - begin);
      };
      found = bound_.emplace(std::make_pair(begin, end), Bind(place, setting)).first;
    }
    Execute(found->second);
  }

  /// A rule that sees whole parameters: writes into memory of its own first.
  void BindWhole(const std::filesystem::path& path) {
    const auto& layout = state_->layout_;
    auto& feeds = whole_.feeds;
    feeds = {rate_value_, step_value_};
    if (clip_norm_) feeds.push_back(scale_value_);
    const auto [slots_begin, slots_end] = layout.Stretch("slot");
    whole_end_ = std::max(slots_end, module_->end_);
    following_ = detail::Allocate(whole_end_ - module_->begin_);
    const auto tensor = [&](uint8_t* place, const detail::Tensor& of) {
      module_->tensors_.push_back(Ort::Value::CreateTensor(module_->host_, place, static_cast<size_t>(of.bytes),
                                                           of.dims.data(), of.dims.size(), of.type));
      return static_cast<OrtValue*>(module_->tensors_.back());
    };
    for (const auto& of : layout.tensors)
      if (layout.parts[of.first].role == "trainable")
        feeds.push_back(tensor(module_->gradients_.get() + (of.offset - module_->begin_), of));
    for (const auto& of : layout.tensors) {
      const auto& role = layout.parts[of.first].role;
      if (role != "trainable" && role != "slot") continue;
      feeds.push_back(tensor(state_->At(of.offset), of));
      whole_.targets.push_back(tensor(following_.get() + (of.offset - module_->begin_), of));
    }
    if (feeds.size() != graph_.inputs.size() || whole_.targets.size() != graph_.outputs.size())
      throw ModelError("'" + path.string() + "' does not fit the state: do they belong together?");
  }

  void UpdateWhole() {
    Execute(whole_);
    std::memcpy(state_->At(module_->begin_), following_.get(), static_cast<size_t>(whole_end_ - module_->begin_));
  }

  Module* module_;
  CheckpointState* state_;
  Module::Graph graph_;
  bool elementwise_ = true;
  std::optional<double> clip_norm_;
  size_t count_ = 0, pieces_ = 0, block_ = 0;
  std::map<std::string, uint64_t> slots_;
  std::vector<std::unique_ptr<Setting>> settings_;
  std::vector<Run> runs_;
  std::vector<uint8_t> awake_, written_;
  std::map<std::pair<size_t, size_t>, Bound> bound_;
  Bound whole_;
  detail::Memory following_;
  uint64_t whole_end_ = 0;
  int64_t step_ = 0;
  float scale_ = 1.0f, single_ = 1e-3f;
  Ort::Value step_value_{nullptr}, scale_value_{nullptr}, rate_value_{nullptr};
  double rate_ = 1e-3;
  int skipped_ = 0;
};

/// Rises to the initial rate over the warmup, then falls linearly to 0 at the last step.
class LinearLRScheduler {
 public:
  LinearLRScheduler(Optimizer& optimizer, int64_t warmup_step_count, int64_t total_step_count, double initial_lr)
      : optimizer_(&optimizer), warmup_(warmup_step_count), total_(total_step_count), initial_(initial_lr) {
    if (warmup_ < 0) throw Error("warmup_step_count is " + std::to_string(warmup_) + ": it must not be negative");
    if (total_ <= 0) throw Error("total_step_count is " + std::to_string(total_) + ": it must be positive");
    if (!(std::isfinite(initial_) && initial_ >= 0)) throw Error("initial_lr must be a finite number, 0 or more");
    auto& extras = optimizer.module_->state_->extras_;
    const std::string saved = extras.count("scheduler") ? extras["scheduler"] : "";
    const std::string key = "\"step\": ";
    const size_t at = saved.find(key);
    if (saved.find("\"LinearLRScheduler\"") != std::string::npos && at != std::string::npos)
      step_ = std::strtoll(saved.c_str() + at + key.size(), nullptr, 10);
    extras["initial_learning_rate"] = CheckpointState::Spell(initial_);
    Apply();
  }

  /// Go one step on; call it after `Optimizer::Step`.
  void Step() {
    ++step_;
    Apply();
  }

 private:
  void Apply() {
    const auto now = static_cast<double>(step_);
    const double left = std::max(0.0, (static_cast<double>(total_) - now) /
                                          static_cast<double>(std::max<int64_t>(1, total_ - warmup_)));
    const double rate = step_ < warmup_ ? initial_ * now / static_cast<double>(std::max<int64_t>(1, warmup_))
                                        : initial_ * left;
    optimizer_->SetLearningRate(rate);
    optimizer_->module_->state_->extras_["scheduler"] =
        "s:{\"kind\": \"LinearLRScheduler\", \"step\": " + std::to_string(step_) + "}";
  }

  Optimizer* optimizer_;
  int64_t warmup_, total_, step_ = 0;
  double initial_;
};

/// All of it in one object, with the names of onnxruntime-training's Ort::TrainingSession.
class TrainingSession {
 public:
  TrainingSession(const Ort::Env& env, const Ort::SessionOptions& options, CheckpointState& state,
                  const std::filesystem::path& gradient_step,
                  const std::optional<std::filesystem::path>& eval_model = {},
                  const std::optional<std::filesystem::path>& update_step = {})
      : module_(env, options, state, gradient_step, eval_model), optimizer_(module_, update_step) {}

  std::vector<Ort::Value> TrainStep(const std::vector<Ort::Value>& inputs) { return module_.TrainStep(inputs); }
  std::vector<Ort::Value> EvalStep(const std::vector<Ort::Value>& inputs) { return module_.EvalStep(inputs); }
  void LazyResetGrad() { module_.LazyResetGrad(); }
  void OptimizerStep() { optimizer_.Step(); }
  void SetLearningRate(float rate) { optimizer_.SetLearningRate(static_cast<double>(rate)); }
  float GetLearningRate() const { return static_cast<float>(optimizer_.GetLearningRate()); }
  void RegisterLinearLRScheduler(int64_t warmup_step_count, int64_t total_step_count, float initial_lr) {
    scheduler_.emplace(optimizer_, warmup_step_count, total_step_count, static_cast<double>(initial_lr));
  }
  void SchedulerStep() {
    if (!scheduler_) throw Error("no learning-rate scheduler is registered: call RegisterLinearLRScheduler");
    scheduler_->Step();
  }
  void ExportModelForInferencing(const std::filesystem::path& path,
                                 const std::vector<std::string>& graph_output_names) const {
    module_.ExportModelForInferencing(path, graph_output_names);
  }
  std::vector<std::string> InputNames(bool training) { return module_.InputNames(training); }
  std::vector<std::string> OutputNames(bool training) { return module_.OutputNames(training); }
  Ort::Value ToBuffer(bool only_trainable) const { return module_.ToBuffer(only_trainable); }
  void FromBuffer(const Ort::Value& buffer, bool only_trainable = true) {
    module_.FromBuffer(buffer, only_trainable);
  }
  Module& module() { return module_; }
  Optimizer& optimizer() { return optimizer_; }

 private:
  Module module_;
  Optimizer optimizer_;
  std::optional<LinearLRScheduler> scheduler_;
};

}  // namespace onward
