// The allocator of the devices: memory of the host, known to the simulation.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstring>

#include "state.hpp"

namespace simulated {

// What a storage on a device holds: the memory itself, or a storage of the host that has it.
struct Holder {
  c10::DataPtr memory;
  c10::Storage storage;
  const void* address;

  static void release(void* holder) {
    auto* held = static_cast<Holder*>(holder);
    {
      std::lock_guard<std::mutex> lock(simulation().mutex);
      simulation().memory.free(held->address);
    }
    delete held;
  }

  static c10::DataPtr of_memory(c10::DataPtr memory, int device) {
    void* address = memory.get();
    auto* held = new Holder{std::move(memory), c10::Storage(), address};
    return {address, held, &release, c10::Device(CUDA, device)};
  }

  static c10::DataPtr of_storage(const c10::Storage& storage, int device) {
    void* address = const_cast<void*>(storage.data());
    auto* held = new Holder{c10::DataPtr(), storage, address};
    return {address, held, &release, c10::Device(CUDA, device)};
  }
};

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    int device = current_device;
    auto memory = at::getCPUAllocator()->allocate(size);
    if (memory) {
      std::memset(memory.get(), 0xff, size);  // reads as NaN before it is written
      std::lock_guard<std::mutex> lock(simulation().mutex);
      int stream = index_of(current_stream(device));
      simulation().streams.tick(stream);
      auto bytes = static_cast<int64_t>(size);
      simulation().memory.allocate(memory.get(), bytes, stream, "an allocation");
    }
    return Holder::of_memory(std::move(memory), device);
  }

  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record(data.get(), stream);
  }

  static void record(const void* address, const c10::Stream& stream) {
    std::lock_guard<std::mutex> lock(simulation().mutex);
    simulation().memory.record_stream(address, index_of(stream));
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
};

inline Allocator allocator;

}  // namespace simulated
