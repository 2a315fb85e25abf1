// Generators of random numbers: each says that it is of its device, and has one of the host inside.
#pragma once

#include <ATen/CPUGeneratorImpl.h>

#include "state.hpp"

namespace simulated {

struct Generator final : c10::GeneratorImpl {
  explicit Generator(int device)
      : GeneratorImpl(c10::Device(CUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}

  static at::Generator& inside(const at::Generator& generator) {
    return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner;
  }

  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_offset(uint64_t given) override { offset = given; }
  uint64_t get_offset() const override { return offset; }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->inner = inner.clone();
    copy->offset = offset;
    return copy;
  }

  at::Generator inner = at::make_generator<at::CPUGeneratorImpl>();
  uint64_t offset = 0;
};

inline const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int k = 0; k < devices(); k++) made->push_back(at::make_generator<Generator>(k));
    return made;
  }();
  return all->at(device < 0 ? current_device : device);
}

// Python gets hold of the default generators by torch.Generator(device) while this is set.
inline bool new_generators_are_default = false;

}  // namespace simulated
