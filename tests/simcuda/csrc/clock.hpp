// What happened before what, among the streams of all devices.
//
// A stream has a vector clock: for each stream, how many of its operations come before whatever this
// stream runs next. An operation advances its own stream's count; waiting for an event takes over the
// clock that the event has recorded. An operation is ordered before a stream's next one exactly if
// that stream's clock has counted it, whatever the timing was.
#pragma once

#include <c10/core/Device.h>

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

namespace simulated {

constexpr auto CUDA = c10::DeviceType::CUDA;

class Clock {
 public:
  uint64_t of(int stream) const { return stream < size() ? counts_[stream] : 0; }

  void tick(int stream) {
    if (stream >= size()) counts_.resize(stream + 1, 0);
    ++counts_[stream];
  }

  void join(const Clock& other) {
    if (size() < other.size()) counts_.resize(other.size(), 0);
    for (int k = 0; k < other.size(); k++) counts_[k] = std::max(counts_[k], other.counts_[k]);
  }

 private:
  int size() const { return static_cast<int>(counts_.size()); }
  std::vector<uint64_t> counts_;
};

// The streams of all devices, each an index here. On its device a stream has an id; 0 is the default.
class Streams {
 public:
  explicit Streams(int devices) : of_device_(devices), handed_out_(devices, 0) {
    for (int device = 0; device < devices; device++) add(device);
  }

  int devices() const { return static_cast<int>(of_device_.size()); }
  int at(int device, int64_t id) const { return of_device_.at(device).at(id); }
  const std::vector<int>& of(int device) const { return of_device_.at(device); }
  int device_of(int stream) const { return streams_[stream].device; }

  std::string name(int stream) const {
    std::ostringstream out;
    out << "cuda:" << streams_[stream].device << "/stream " << streams_[stream].id;
    return out.str();
  }

  // The id of the next stream of the pool, which hands out the same 32 in turn, as PyTorch's does.
  int64_t next_of_pool(int device) {
    constexpr int pool = 32;
    int64_t id = 1 + handed_out_[device]++ % pool;
    if (id == static_cast<int64_t>(of_device_[device].size())) add(device);
    return id;
  }

  const Clock& clock(int stream) const { return streams_[stream].clock; }
  uint64_t now(int stream) const { return clock(stream).of(stream); }
  void tick(int stream) { streams_[stream].clock.tick(stream); }
  void wait(int stream, const Clock& moment) { streams_[stream].clock.join(moment); }

  // After the host has waited, whatever any of its threads queues anywhere comes later.
  void host_waits(const Clock& moment) {
    host_.join(moment);
    for (auto& each : streams_) each.clock.join(moment);
  }
  void host_waits_for_stream(int stream) { host_waits(Clock(clock(stream))); }

 private:
  struct Stream {
    int device;
    int64_t id;
    Clock clock;
  };

  void add(int device) {
    auto id = static_cast<int64_t>(of_device_[device].size());
    of_device_[device].push_back(static_cast<int>(streams_.size()));
    streams_.push_back({device, id, host_});
  }

  std::vector<Stream> streams_;
  std::vector<std::vector<int>> of_device_;  // indices by id
  std::vector<int> handed_out_;
  Clock host_;
};

}  // namespace simulated
