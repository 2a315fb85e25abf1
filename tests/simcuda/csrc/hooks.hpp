// What ATen asks of a CUDA build without linking with it.
#pragma once

#include <ATen/detail/CUDAHooksInterface.h>

#include "generators.hpp"
#include "guard.hpp"

namespace simulated {

struct Hooks final : at::CUDAHooksInterface {
  using Index = c10::DeviceIndex;

  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(Index) const override { return true; }

  Index deviceCount() const override { return static_cast<Index>(devices()); }
  int getNumGPUs() const override { return devices(); }
  Index current_device() const override { return getCurrentDevice(); }
  Index getCurrentDevice() const override { return static_cast<Index>(simulated::current_device); }
  void setCurrentDevice(Index device) const override { simulated::current_device = device; }
  Index exchangeDevice(Index device) const override {
    Index old = getCurrentDevice();
    if (device >= 0) setCurrentDevice(device);
    return old;
  }
  Index maybeExchangeDevice(Index device) const override { return exchangeDevice(device); }
  void deviceSynchronize(Index device) const override { Guard().synchronizeDevice(device); }

  const at::Generator& getDefaultGenerator(Index device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(Index device) const override {
    if (new_generators_are_default) return default_generator(device);
    return at::make_generator<Generator>(device < 0 ? getCurrentDevice() : device);
  }

  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* address) const override { return pinned_allocator.has(address); }
  at::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  c10::Device getDeviceFromPtr(void* address) const override {
    std::lock_guard<std::mutex> lock(simulation().mutex);
    int device = simulation().memory.device_of(address);
    TORCH_CHECK(device >= 0, "not a pointer to device memory");
    return c10::Device(CUDA, device);
  }
};

}  // namespace simulated

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, ::simulated::Hooks)
}
