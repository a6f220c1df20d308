#include "train/offloaded_update.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <deque>
#include <utility>

#include "base/error.h"
#include "kernels/common/host_snapshot.h"

namespace bough {

namespace {

class SideStreamCopies final : public OrderedCopies {
 public:
  explicit SideStreamCopies(at::Device device)
      : guard_(device.type()),
        device_(device.has_index() ? device : guard_.getDevice()),
        stream_(guard_.getStreamFromGlobalPool(device_)) {}

  at::Tensor allocate(int64_t bytes) override { return allocate_pinned(bytes); }
  void enter() override {
    c10::Event ready(device_.type());
    ready.record(guard_.getStream(device_));
    ready.block(stream_);
  }
  int64_t begin(const at::Tensor& to, const at::Tensor& from) override {
    {
      const c10::StreamGuard guard(stream_);
      to.copy_(from, /*non_blocking=*/true);
    }
    pending_.emplace_back(device_.type());
    pending_.back().record(stream_);
    return num_begun_++;
  }
  void finish(int64_t number) override {
    for (; first_pending_ <= number; ++first_pending_) {
      pending_.front().synchronize();
      pending_.pop_front();
    }
  }
  void leave() override {
    c10::Event done(device_.type());
    done.record(stream_);
    done.block(guard_.getStream(device_));
  }

 private:
  const c10::impl::VirtualGuardImpl guard_;
  const at::Device device_;
  const c10::Stream stream_;
  std::deque<c10::Event> pending_;
  int64_t num_begun_ = 0, first_pending_ = 0;
};

}  // namespace

std::unique_ptr<OrderedCopies> copies_on_side_stream(at::Device device) {
  return std::make_unique<SideStreamCopies>(device);
}

void OffloadedUpdate::run(const std::vector<Call>& calls) {
  struct Piece {
    const Call* call;
    int64_t begin, count;
    at::Tensor of(const at::Tensor& whole) const {
      return whole.defined() ? whole.narrow(0, begin, count) : whole;
    }
    // This piece's place in a slot's buffer.
    at::Tensor in(const at::Tensor& bytes, const at::Tensor& like) const {
      return bytes.narrow(0, 0, count * static_cast<int64_t>(like.element_size())).view(like.scalar_type());
    }
  };
  std::vector<Piece> pieces;
  for (const Call& call : calls)
    for (int64_t begin = 0; begin < call.state.value.numel(); begin += piece_elements_)
      pieces.push_back({&call, begin, std::min(piece_elements_, call.state.value.numel() - begin)});
  if (pieces.empty()) return;
  for (Slot& slot : slots_)
    for (at::Tensor* bytes : {&slot.gradient, &slot.value})
      if (!bytes->defined()) *bytes = copies_->allocate(piece_elements_ * int64_t{sizeof(double)});

  copies_->enter();
  const auto fetch = [&](size_t number) {
    const Piece& piece = pieces[number];
    const AdamwState& state = piece.call->state;
    Slot& slot = slots_[number % 2];
    if (!state.master.defined()) copies_->begin(piece.in(slot.value, state.value), piece.of(state.value));
    slot.arrived = copies_->begin(piece.in(slot.gradient, state.gradient), piece.of(state.gradient));
  };
  fetch(0);
  for (size_t number = 0; number < pieces.size(); ++number) {
    if (number + 1 < pieces.size()) fetch(number + 1);
    const Piece& piece = pieces[number];
    const AdamwState& state = piece.call->state;
    const Slot& slot = slots_[number % 2];
    // The weights that the slot held before were sent before this gradient was fetched, so they have left.
    copies_->finish(slot.arrived);
    const at::Tensor value = piece.in(slot.value, state.value);
    adamw({value, piece.of(state.master), piece.of(state.exp_avg), piece.of(state.exp_avg_sq),
           piece.in(slot.gradient, state.gradient)},
          piece.call->step);
    copies_->begin(piece.of(state.value), value);
  }
  copies_->leave();
}

}  // namespace bough
