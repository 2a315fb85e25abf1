// The state of the simulation: one for the process, under one lock, and what is current per thread.
#pragma once

#include <c10/core/Stream.h>

#include <cstdlib>
#include <mutex>

#include "memory.hpp"

namespace simulated {

struct Simulation {
  std::mutex mutex;  // whoever uses the members holds it
  Streams streams;
  Memory memory;

  explicit Simulation(int devices) : streams(devices), memory(streams) {}
};

inline int devices() {
  static const int given = [] {
    const char* text = std::getenv("SIMULATED_GPUS");
    return text ? std::max(1, std::atoi(text)) : 1;
  }();
  return given;
}

// Never destroyed: tensors are freed until the very end of the process.
inline Simulation& simulation() {
  static auto* only = new Simulation(devices());
  return *only;
}

inline thread_local int current_device = 0;
inline thread_local std::vector<int64_t> current_ids;  // of streams, by device

inline int64_t& current_id(int device) {
  if (current_ids.empty()) current_ids.resize(devices(), 0);
  return current_ids.at(device);
}

inline int index_of(c10::Device device) {
  return device.has_index() ? device.index() : current_device;
}

inline c10::Stream current_stream(int device) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(CUDA, device), current_id(device));
}

// The index of a stream among those of all devices; under the lock.
inline int index_of(const c10::Stream& stream) {
  return simulation().streams.at(stream.device_index(), stream.id());
}

}  // namespace simulated
