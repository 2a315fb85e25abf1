// Devices, streams and events as PyTorch's core asks for them, autograd's engine among others.
#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "allocator.hpp"

namespace simulated {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using Index = c10::DeviceIndex;
  using Lock = std::lock_guard<std::mutex>;

  // Devices.

  c10::DeviceType type() const override { return CUDA; }
  Index deviceCount() const noexcept override { return static_cast<Index>(devices()); }
  Device getDevice() const override { return Device(CUDA, current_device); }
  Device exchangeDevice(Device device) const override {
    Device old = getDevice();
    setDevice(device);
    return old;
  }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < devices(), "CUDA error: invalid device ordinal");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  void synchronizeDevice(const Index device) const override {
    Lock lock(simulation().mutex);
    auto& streams = simulation().streams;
    for (int stream : streams.of(device < 0 ? current_device : device))
      streams.host_waits_for_stream(stream);
  }

  // Streams.

  c10::Stream getStream(Device device) const override { return current_stream(index_of(device)); }
  c10::Stream getDefaultStream(Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, Device(CUDA, index_of(device)));
  }
  c10::Stream getNewStream(Device device, int /*priority*/ = 0) const override {
    Lock lock(simulation().mutex);
    int index = index_of(device);
    auto id = simulation().streams.next_of_pool(index);
    return c10::Stream(c10::Stream::UNSAFE, Device(CUDA, index), id);
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream old = current_stream(stream.device_index());
    current_id(stream.device_index()) = stream.id();
    return old;
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override {
    Lock lock(simulation().mutex);
    simulation().streams.host_waits_for_stream(index_of(stream));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Allocator::record(data.get(), stream);
  }

  // Events: null until they are recorded, then the clock that they have recorded.

  void record(void** event, const c10::Stream& stream, const Index device, const c10::EventFlag)
      const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "Event device ", int(device),
        " does not match recording stream's device ", int(stream.device_index()));
    Lock lock(simulation().mutex);
    if (!*event) *event = new Clock();
    int index = index_of(stream);
    simulation().streams.tick(index);
    *static_cast<Clock*>(*event) = simulation().streams.clock(index);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    Lock lock(simulation().mutex);
    simulation().streams.wait(index_of(stream), *static_cast<Clock*>(event));
  }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    Lock lock(simulation().mutex);
    simulation().streams.host_waits(*static_cast<Clock*>(event));
  }
  double elapsedTime(void*, void*, const Index) const override { return 0; }  // Python measures it
  void destroyEvent(void* event, const Index) const noexcept override {
    delete static_cast<Clock*>(event);
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

}  // namespace simulated
