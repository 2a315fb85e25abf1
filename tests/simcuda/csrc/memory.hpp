// Blocks of device memory, who used which part of them when, and the hazards in that.
//
// Two hazards are noticed. A race: two streams use the same bytes, one of them writes, and no event
// orders the two. And memory that is freed too early: the allocator gives it to the next that
// allocates on the block's own stream, which must come after every use on other streams, or after what
// the streams that record_stream has named have queued until then.
#pragma once

#include <c10/util/Exception.h>

#include <deque>
#include <limits>
#include <map>
#include <set>

#include "clock.hpp"

namespace simulated {

struct Span {
  int64_t begin, end;  // bytes
};

struct Access {
  Span span;
  int stream;
  uint64_t when;  // the count of its stream
  bool writes;
  std::string by;  // the operator

  std::string verb() const { return by + (writes ? " writes" : " reads"); }
};

struct Block {
  int stream;  // on which it was allocated
  int64_t size;
  std::vector<Access> accesses;
  std::set<int> recorded;  // streams, by record_stream
};

class Memory {
 public:
  explicit Memory(Streams& streams)
      : streams_(streams), allocated_(streams.devices(), 0), peak_(streams.devices(), 0),
        limit_(streams.devices(), std::numeric_limits<int64_t>::max()) {}

  void allocate(const void* address, int64_t size, int stream, const std::string& by) {
    if (!address) return;
    int device = streams_.device_of(stream);
    TORCH_CHECK_WITH(OutOfMemoryError, allocated_[device] + size <= limit_[device],
        "CUDA out of memory. Tried to allocate ", size, " bytes. simulated GPU ", device, " has ",
        limit_[device], " bytes, of which ", allocated_[device], " are allocated.");
    Block& block = blocks_[static_cast<const char*>(address)];
    block = Block{stream, size, {{{0, size}, stream, streams_.now(stream), true, by}}, {}};
    allocated_[device] += size;
    peak_[device] = std::max(peak_[device], allocated_[device]);
  }

  void free(const void* address) {
    auto found = blocks_.find(static_cast<const char*>(address));
    if (found == blocks_.end()) return;
    report_early_free(found->second);
    allocated_[streams_.device_of(found->second.stream)] -= found->second.size;
    blocks_.erase(found);
  }

  void record_stream(const void* address, int stream) {
    auto found = block_of(address);
    if (found != blocks_.end()) found->second.recorded.insert(stream);
  }

  // Notes that an operator uses the span of bytes after the address on the stream, now.
  void use(const void* address, Span span, int stream, bool writes, const std::string& by) {
    auto found = block_of(address);
    if (found == blocks_.end() || span.begin == span.end) return;
    int64_t shift = static_cast<const char*>(address) - found->first;
    span = {span.begin + shift, span.end + shift};
    Access access{span, stream, streams_.now(stream), writes, by};
    report_race(found->second, access);
    remember(found->second, std::move(access));
  }

  int device_of(const void* address) {
    auto found = block_of(address);
    return found == blocks_.end() ? -1 : streams_.device_of(found->second.stream);
  }

  int64_t allocated(int device) const { return allocated_.at(device); }
  int64_t peak(int device) const { return peak_.at(device); }
  void reset_peak(int device) { peak_.at(device) = allocated_.at(device); }
  void set_limit(int device, int64_t bytes) { limit_.at(device) = bytes; }

  const std::deque<std::string>& hazards() const { return hazards_; }
  void forget_hazards() { hazards_.clear(); }

 private:
  using Blocks = std::map<const char*, Block>;

  Blocks::iterator block_of(const void* address) {
    auto* byte = static_cast<const char*>(address);
    auto next = blocks_.upper_bound(byte);
    if (next == blocks_.begin()) return blocks_.end();
    auto found = std::prev(next);
    bool inside = byte < found->first + std::max<int64_t>(found->second.size, 1);
    return inside ? found : blocks_.end();
  }

  bool comes_before(const Access& access, int stream) const {
    return access.stream == stream || streams_.clock(stream).of(access.stream) >= access.when;
  }

  void report_race(const Block& block, const Access& access) {
    for (const auto& other : block.accesses) {
      bool apart = other.span.end <= access.span.begin || access.span.end <= other.span.begin;
      bool both_read = !other.writes && !access.writes;
      if (apart || both_read || comes_before(other, access.stream)) continue;
      std::ostringstream out;
      out << "race: " << access.verb() << " on " << streams_.name(access.stream) << " what "
          << other.verb() << " on " << streams_.name(other.stream) << ", and neither waits for the"
          << " other (" << block.size << " bytes allocated on " << streams_.name(block.stream) << ")";
      hazards_.push_back(out.str());
      return;  // one report for each use is enough
    }
  }

  void report_early_free(const Block& block) {
    for (const auto& access : block.accesses) {
      auto waits = [&](int stream) { return comes_before(access, stream); };
      if (waits(block.stream) || std::any_of(block.recorded.begin(), block.recorded.end(), waits))
        continue;
      std::ostringstream out;
      out << "freed too early: " << block.size << " bytes allocated on "
          << streams_.name(block.stream) << " may be used again while " << access.verb()
          << " them on " << streams_.name(access.stream) << "; neither record_stream nor a wait";
      hazards_.push_back(out.str());
      return;
    }
  }

  // An earlier access may be dropped if whatever conflicts with it conflicts with the new one too.
  void remember(Block& block, Access access) {
    auto covered = [&](const Access& old) {
      bool inside = access.span.begin <= old.span.begin && old.span.end <= access.span.end;
      bool as_strong = access.writes || !old.writes;
      bool follows = old.stream == access.stream ||
          (access.writes && comes_before(old, access.stream));
      return inside && as_strong && follows;
    };
    auto& accesses = block.accesses;
    accesses.erase(std::remove_if(accesses.begin(), accesses.end(), covered), accesses.end());
    accesses.push_back(std::move(access));
  }

  Streams& streams_;
  Blocks blocks_;
  std::vector<int64_t> allocated_, peak_, limit_;  // bytes by device
  std::deque<std::string> hazards_;  // where they are, they stay: Python reads them
};

}  // namespace simulated
