// Operands of a handler, taken one after the other by name: dtype and shape are checked, and the first mismatch becomes
// the handler's error, "OPERATION: expected X, got Y (argument Z)".
#pragma once

#include <cstring>
#include <functional>
#include <string>
#include <type_traits>

#include "bindings/ffi.h"

namespace musejax {

template <typename T>
constexpr ffi::DataType DataTypeOf() {
  using U = std::remove_const_t<T>;
  if constexpr (std::is_same_v<U, float>)
    return ffi::DataType::F32;
  else if constexpr (std::is_same_v<U, int32_t>)
    return ffi::DataType::S32;
  else if constexpr (std::is_same_v<U, uint16_t>)
    return ffi::DataType::BF16;
  else
    return ffi::DataType::U8;
}

inline const char* DataTypeText(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return "float32";
    case ffi::DataType::S32:
      return "int32";
    case ffi::DataType::BF16:
      return "bfloat16";
    case ffi::DataType::U8:
      return "uint8";
    default:
      return "another dtype";
  }
}

class Operands {
 public:
  // Copies an operand to a result that does not overlap it; false if that fails.
  using Copy = std::function<bool(void* to, const void* from, size_t bytes)>;
  static bool CopyOnHost(void* to, const void* from, size_t bytes) {
    if (bytes) std::memcpy(to, from, bytes);
    return true;
  }

  Operands(std::string operation, ffi::RemainingArgs args, ffi::RemainingRets rets, Copy copy = CopyOnHost)
      : operation_(std::move(operation)), args_(args), rets_(rets), copy_(std::move(copy)) {}

  // Size of one axis of operand `index`, to learn the number of rows or slices; 0 if there is none.
  int64_t Size(size_t index, size_t axis) const {
    auto buffer = args_.get<ffi::AnyBuffer>(index);
    return buffer.has_value() && axis < buffer->dimensions().size() ? buffer->dimensions()[axis] : 0;
  }
  size_t args() const { return args_.size(); }
  // Likewise of result `index`, whose shape the caller chose.
  int64_t ResultSize(size_t index, size_t axis) const {
    auto buffer = rets_.get<ffi::AnyBuffer>(index);
    return buffer.has_value() && axis < (*buffer)->dimensions().size() ? (*buffer)->dimensions()[axis] : 0;
  }

  // The next operand, or the next result.
  template <typename T>
  const T* In(const std::string& name, std::initializer_list<int64_t> shape) {
    auto buffer = args_.get<ffi::AnyBuffer>(next_arg_++);
    return Checked<const T>(name, buffer, shape);
  }
  template <typename T>
  T* Out(const std::string& name, std::initializer_list<int64_t> shape) {
    auto result = rets_.get<ffi::AnyBuffer>(next_ret_++);
    if (!result.has_value()) return Fail<T>(Mismatch(operation_, name, "a result", "none"));
    ffi::ErrorOr<ffi::AnyBuffer> buffer(**result);
    return Checked<T>(name, buffer, shape);
  }
  // An operand that is also the next result, updated in place; copied where XLA gave two buffers.
  template <typename T>
  T* InOut(const std::string& name, std::initializer_list<int64_t> shape) {
    const T* in = In<T>(name, shape);
    T* out = Out<T>(name, shape);
    if (in && out && in != out) {
      size_t bytes = sizeof(T);
      for (int64_t d : shape) bytes *= size_t(d);
      if (!copy_(out, in, bytes)) return Fail<T>(Mismatch(operation_, name, "a copy", "a failure of the device"));
    }
    return out;
  }

  // A condition on values or attributes.
  template <typename Expected, typename Got>
  void Require(bool holds, const std::string& name, const Expected& expected, const Got& got) {
    if (!holds) Fail<int>(Mismatch(operation_, name, expected, got));
  }
  bool ok() const { return error_.empty(); }
  ffi::Error error() const {
    if (next_arg_ != args_.size() && ok())
      return ffi::Error::InvalidArgument(Mismatch(operation_, "operands", next_arg_, args_.size()));
    return ok() ? ffi::Error::Success() : ffi::Error::InvalidArgument(error_);
  }

 private:
  template <typename T>
  T* Fail(std::string text) {
    if (ok()) error_ = std::move(text);
    return nullptr;
  }
  template <typename T>
  T* Checked(const std::string& name, ffi::ErrorOr<ffi::AnyBuffer>& buffer, std::initializer_list<int64_t> shape) {
    if (!buffer.has_value()) return Fail<T>(Mismatch(operation_, name, "an operand", "none"));
    if (buffer->element_type() != DataTypeOf<T>())
      return Fail<T>(Mismatch(operation_, name, DataTypeText(DataTypeOf<T>()), DataTypeText(buffer->element_type())));
    const auto got = buffer->dimensions();
    if (!std::equal(got.begin(), got.end(), shape.begin(), shape.end()))
      return Fail<T>(
          Mismatch(operation_, name, ShapeText(shape.begin(), shape.size()), ShapeText(got.begin(), got.size())));
    return static_cast<T*>(buffer->untyped_data());
  }

  std::string operation_, error_;
  ffi::RemainingArgs args_;
  ffi::RemainingRets rets_;
  Copy copy_;
  size_t next_arg_ = 0, next_ret_ = 0;
};

}  // namespace musejax
