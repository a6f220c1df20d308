#include "host_order.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>

#include "block.h"
#include "host_threads.h"
#include "lock.h"

namespace bough::emulation {

namespace {

constexpr size_t kHost = kStreams;

struct Record {
  const char *begin, *end;
  bool is_write;
  size_t by;       // stream or kHost
  uint64_t epoch;  // of `by`
  std::string op;

  bool overlaps(const Record& other) const { return begin < other.end && other.begin < end; }
  bool covers(const Record& other) const { return begin <= other.begin && other.end <= end; }
};

struct Allocation {
  uint64_t number;
  const char* begin;
  size_t bytes;
  MemoryKind kind;
  size_t stream;
  std::set<size_t> users;  // streams for which the allocator waits
  std::vector<Record> records;
};

struct State {
  Lock mutex;
  std::array<Clock, kStreams> clocks = {};
  Clock known = {};  // what any thread of the host has waited for
  std::unordered_map<const void*, Clock> mutexes;
  std::map<const char*, Allocation> allocations;  // by begin
  uint64_t last_number = 0;

  Allocation* find(const void* address) {
    const auto* const at = static_cast<const char*>(address);
    auto after = allocations.upper_bound(at);
    if (after == allocations.begin()) return nullptr;
    Allocation& found = std::prev(after)->second;
    return at < found.begin + found.bytes ? &found : nullptr;
  }
};

// Never destroyed: tensors in static variables may outlive this file's variables.
State& state() {
  static auto* const instance = new State;
  return *instance;
}

void join(Clock& clock, const Clock& other) {
  for (size_t i = 0; i < clock.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

// The clock of the calling thread. The state must be locked.
struct HostThread {
  bool has_begun = false;
  Clock clock = {};
};
thread_local HostThread host_thread;
Clock& host_clock(const State& s) {
  if (!host_thread.has_begun) host_thread = {true, s.known};
  return host_thread.clock;
}

void releases(const void* mutex) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  join(s.mutexes[mutex], host_clock(s));
}
void acquires(const void* mutex) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (const auto found = s.mutexes.find(mutex); found != s.mutexes.end()) join(host_clock(s), found->second);
}
void joined() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  join(host_clock(s), s.known);
}
constexpr ThreadOrder kThreadOrder{releases, acquires, joined};
[[maybe_unused]] const bool has_order = (bough_emulation_thread_order.store(&kThreadOrder), true);

std::string name_of(size_t actor) {
  return actor == kHost ? "the host" : "stream " + std::to_string(actor);
}

std::string text_of(const Allocation& of) {
  return (of.kind == MemoryKind::kPinned ? "pinned memory " : "device memory ") + std::to_string(of.number) +
         " of " + std::to_string(of.bytes) + " bytes";
}

std::string text_of(const Record& record, const Allocation& of) {
  return (record.is_write ? "writes bytes " : "reads bytes ") + std::to_string(record.begin - of.begin) +
         " to " + std::to_string(record.end - of.begin) + " of " + text_of(of);
}

std::string missing_edge(size_t later, const Record& before) {
  const std::string after = name_of(before.by) + " after " + before.op;
  return later == kHost ? "the host has waited for no event on " + after + ", for the stream or the device"
                        : name_of(later) + " waits for no event on " + after;
}

// Fails if a record of another stream conflicts with the access and is not ordered before `clock`.
void check(const Allocation& of, const Record& access, const Clock& clock) {
  for (const Record& before : of.records) {
    if (before.by == access.by || !before.overlaps(access) || !(before.is_write || access.is_write)) continue;
    if (before.epoch <= clock[before.by]) continue;
    fail((access.op + " on " + name_of(access.by) + " " + text_of(access, of) + ", while " + before.op +
          " on " + name_of(before.by) + " " + (before.is_write ? "writes" : "reads") +
          " it; nothing orders the two: " + missing_edge(access.by, before))
             .c_str());
  }
}

// Drops the records that the new one makes unneeded: whatever is ordered after the new one is ordered after
// them.
void add(Allocation& to, Record access, const Clock& clock) {
  std::erase_if(to.records, [&](const Record& before) {
    return access.covers(before) && before.epoch <= clock[before.by] && (access.is_write || !before.is_write);
  });
  to.records.push_back(std::move(access));
}

}  // namespace

void memory_allocated(const void* begin, size_t bytes, MemoryKind kind, int stream) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto* const at = static_cast<const char*>(begin);
  const auto of = static_cast<size_t>(stream);
  Allocation& added = s.allocations[at] = {++s.last_number, at, bytes, kind, of, {}, {}};
  if (kind == MemoryKind::kDevice)
    added.records.push_back({at, at + bytes, /*is_write=*/true, of, s.clocks[of][of], "its former owner"});
}

void memory_freed(const void* begin) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto found = s.allocations.find(static_cast<const char*>(begin));
  if (found == s.allocations.end()) return;
  const Allocation& freed = found->second;
  Clock clock = s.clocks[freed.stream];
  join(clock, host_clock(s));
  for (const Record& use : freed.records)
    if (freed.kind == MemoryKind::kDevice && use.epoch > clock[use.by] && !freed.users.contains(use.by))
      fail((text_of(freed) + ", allocated on " + name_of(freed.stream) + ", is freed while " + use.op +
            " on " + name_of(use.by) + " " + (use.is_write ? "writes" : "reads") +
            " it, without record_stream; the next owner may write to it: " +
            missing_edge(freed.stream, use))
               .c_str());
  s.allocations.erase(found);
}

void stream_uses(const void* begin, int stream) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (Allocation* const found = s.find(begin)) found->users.insert(static_cast<size_t>(stream));
}

uint64_t allocation_at(const void* address) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const Allocation* const found = s.find(address);
  return found ? found->number : 0;
}

void stream_works(int stream, const char* op, const std::vector<Access>& accesses) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto by = static_cast<size_t>(stream);
  Clock& clock = s.clocks[by];
  join(clock, host_clock(s));
  ++clock[by];
  for (const Access& access : accesses) {
    Allocation* const of = access.bytes > 0 ? s.find(access.begin) : nullptr;
    if (!of) continue;
    const auto* const begin = static_cast<const char*>(access.begin);
    Record record{begin, begin + access.bytes, access.is_write, by, clock[by], op};
    check(*of, record, clock);
    add(*of, std::move(record), clock);
  }
}

void host_accesses(const void* address, bool is_write) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto* const at = static_cast<const char*>(address);
  if (const Allocation* const of = s.find(address))
    check(*of, {at, at + 1, is_write, kHost, 0, "an access"}, host_clock(s));
}

Clock clock_of(int stream) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  Clock clock = s.clocks[static_cast<size_t>(stream)];
  join(clock, host_clock(s));
  return clock;
}

void stream_waits(int stream, const Clock& event) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  join(s.clocks[static_cast<size_t>(stream)], event);
}

void host_waits(const Clock& event) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  join(host_clock(s), event);
  join(s.known, event);
}

void host_waits_for_stream(int stream) {
  host_waits(clock_of(stream));
}

void host_waits_for_device() {
  for (int stream = 0; stream < kStreams; ++stream) host_waits_for_stream(stream);
}

}  // namespace bough::emulation
