// CUDA devices for PyTorch's CPU build, in the memory of the host; see the README beside this folder.
//
// One translation unit, as most of the time that a compiler takes goes to PyTorch's headers. From the
// top: clock (what happened before what), memory (who used it when), state (one simulation, what is
// current per thread), allocator, guard (devices, streams, events), generators, hooks, operators,
// tensors. Here everything is registered, and Python has its functions.
#include "hooks.hpp"
#include "tensors.hpp"

namespace simulated {

using torch::CppFunction;

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(CppFunction::makeFromBoxedFunction<&call>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty_memory_format);
  library.impl("empty_strided", empty_strided);
  library.impl("copy_", copy_);
  library.impl("record_stream", record_stream);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Tensor", set_as);
  // On CUDA tensors these would choose kernels that the host has not; so the host itself chooses.
  for (auto name : {"convolution", "convolution_backward"})
    library.impl(name, CppFunction::makeFromBoxedFunction<&call>());
}

const bool allocator_is_set = [] {
  c10::SetAllocator(CUDA, &allocator, /*priority=*/100);
  return true;
}();

using Lock = std::lock_guard<std::mutex>;

}  // namespace simulated

using simulated::simulation;

extern "C" {

int simulated_devices() { return simulated::devices(); }
int simulated_current_device() { return simulated::current_device; }
void simulated_set_device(int device) { simulated::current_device = device; }
void simulated_new_generators_are_default(int yes) { simulated::new_generators_are_default = yes; }

int64_t simulated_allocated(int device) {
  simulated::Lock lock(simulation().mutex);
  return simulation().memory.allocated(device);
}
int64_t simulated_peak(int device) {
  simulated::Lock lock(simulation().mutex);
  return simulation().memory.peak(device);
}
void simulated_reset_peak(int device) {
  simulated::Lock lock(simulation().mutex);
  simulation().memory.reset_peak(device);
}

void simulated_set_limit(int device, int64_t bytes) {
  simulated::Lock lock(simulation().mutex);
  simulation().memory.set_limit(device, bytes);
}

// The text of a hazard is valid until the hazards are forgotten.
int simulated_hazards() {
  simulated::Lock lock(simulation().mutex);
  return static_cast<int>(simulation().memory.hazards().size());
}
const char* simulated_hazard(int index) {
  simulated::Lock lock(simulation().mutex);
  return simulation().memory.hazards().at(index).c_str();
}
void simulated_forget_hazards() {
  simulated::Lock lock(simulation().mutex);
  simulation().memory.forget_hazards();
}

}  // extern "C"
