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

// Pinned memory of the host: any, by its address.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto memory = at::getCPUAllocator()->allocate(size);
    void* address = memory.get();
    std::lock_guard<std::mutex> lock(mutex_);
    sizes_[static_cast<const char*>(address)] = size;
    auto* held = new c10::DataPtr(std::move(memory));
    return {address, held, &release, c10::Device(c10::kCPU)};
  }

  bool has(const void* address) const {
    std::lock_guard<std::mutex> lock(mutex_);
    auto next = sizes_.upper_bound(static_cast<const char*>(address));
    if (next == sizes_.begin()) return false;
    auto found = std::prev(next);
    return address < found->first + std::max<size_t>(found->second, 1);
  }

  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

 private:
  static void release(void* held);

  mutable std::mutex mutex_;
  std::map<const char*, size_t> sizes_;
};

inline PinnedAllocator pinned_allocator;

inline void PinnedAllocator::release(void* held) {
  auto* memory = static_cast<c10::DataPtr*>(held);
  {
    std::lock_guard<std::mutex> lock(pinned_allocator.mutex_);
    pinned_allocator.sizes_.erase(static_cast<const char*>(memory->get()));
  }
  delete memory;
}

}  // namespace simulated
