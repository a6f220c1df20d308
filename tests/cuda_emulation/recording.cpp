#include "recording.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "block.h"

namespace bough::emulation {

Recording*& recording() {
  thread_local Recording* of_thread = nullptr;
  return of_thread;
}

void run_and_record(const std::function<void()>& work) {
  work();
  if (recording()) recording()->add(work);
}

void refuse_in_capture(const char* what) {
  if (recording())
    throw std::runtime_error(std::string("operation not permitted when stream is capturing: ") + what);
}

void Recording::begin() {
  if (recording()) throw std::runtime_error("the thread records another graph");
  recording() = this;
  is_active_ = true;
}

void Recording::end() {
  if (recording() != this) throw std::runtime_error("the thread does not record this graph");
  recording() = nullptr;
  is_active_ = false;
  restore();
}

void Recording::add_accesses(const std::vector<Access>& accesses) {
  for (const Access& access : accesses) {
    const uint64_t allocation = access.bytes > 0 ? allocation_at(access.begin) : 0;
    if (allocation == 0) continue;
    used_.push_back({access, allocation});
    if (!access.is_write || is_saved(access)) continue;
    auto* const begin = static_cast<char*>(const_cast<void*>(access.begin));
    saved_.push_back({begin, {begin, begin + access.bytes}});
  }
}

bool Recording::is_saved(const Access& access) const {
  const auto* const begin = static_cast<const char*>(access.begin);
  return std::any_of(saved_.begin(), saved_.end(), [&](const Saved& saved) {
    return saved.begin <= begin && begin + access.bytes <= saved.begin + saved.bytes.size();
  });
}

void Recording::restore() {
  for (auto saved = saved_.rbegin(); saved != saved_.rend(); ++saved)
    std::memcpy(saved->begin, saved->bytes.data(), saved->bytes.size());
  saved_.clear();
}

void Recording::replay(int stream) const {
  for (const Used& used : used_)
    if (allocation_at(used.access.begin) != used.allocation)
      fail("a graph is replayed after memory that it uses was freed");
  std::vector<Access> accesses;
  for (const Used& used : used_) accesses.push_back(used.access);
  stream_works(stream, "a graph", accesses);
  for (const auto& work : work_) work();
}

}  // namespace bough::emulation
