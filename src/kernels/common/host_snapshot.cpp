#include "kernels/common/host_snapshot.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace bough {

namespace {

at::Tensor bytes_of(const at::Tensor& x) {
  BOUGH_CHECK(x.is_contiguous(), "got a tensor of shape ", x.sizes(), " that is not contiguous");
  return x.view(-1).view(at::kByte);
}

class StreamTransfers final : public DeviceToHost {
 public:
  explicit StreamTransfers(at::Device device)
      : device_(device), done_{c10::Event(device.type()), c10::Event(device.type())} {}

  at::Tensor allocate(int64_t bytes) override { return allocate_pinned(bytes); }
  void begin(const at::Tensor& to, const at::Tensor& from) override {
    to.copy_(from, /*non_blocking=*/true);
    done_[static_cast<size_t>(num_begun_++ % 2)].record(
        c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  }
  void finish(int64_t number) override { done_[static_cast<size_t>(number % 2)].synchronize(); }

 private:
  const at::Device device_;
  std::array<c10::Event, 2> done_;
  int64_t num_begun_ = 0;
};

}  // namespace

at::Tensor allocate_pinned(int64_t bytes) {
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
}

PinnedPieces::PinnedPieces(int64_t bytes, const std::function<at::Tensor(int64_t)>& allocate,
                           int64_t piece_bytes)
    : num_bytes_(bytes), piece_bytes_(piece_bytes) {
  for (int64_t begin = 0; begin < bytes; begin += piece_bytes)
    pieces_.push_back(allocate(std::min(piece_bytes, bytes - begin)));
}

void PinnedPieces::for_each_part(int64_t offset, const at::Tensor& tensor,
                                 const std::function<void(const at::Tensor&, const at::Tensor&)>& use) const {
  const auto size = static_cast<int64_t>(tensor.nbytes());
  BOUGH_CHECK(offset >= 0 && offset + size <= num_bytes_, "got bytes ", offset, " to ", offset + size,
              ", there are ", num_bytes_);
  if (size == 0) return;
  const at::Tensor bytes = bytes_of(tensor);
  for (int64_t at = 0; at < size;) {
    const int64_t within = (offset + at) % piece_bytes_, count = std::min(size - at, piece_bytes_ - within);
    use(pieces_[static_cast<size_t>((offset + at) / piece_bytes_)].narrow(0, within, count),
        bytes.narrow(0, at, count));
    at += count;
  }
}

void PinnedPieces::store(int64_t offset, const at::Tensor& from) {
  for_each_part(offset, from, [](const at::Tensor& piece, const at::Tensor& bytes) {
    piece.copy_(bytes, /*non_blocking=*/true);
  });
}

void PinnedPieces::load(int64_t offset, const at::Tensor& to) const {
  for_each_part(offset, to, [](const at::Tensor& piece, const at::Tensor& bytes) {
    bytes.copy_(piece, /*non_blocking=*/true);
  });
}

at::Tensor HostCopier::copy(const at::Tensor& x) {
  if (!transfers_ && x.is_cpu()) return x.clone();
  if (!transfers_) transfers_ = std::make_unique<StreamTransfers>(x.device());
  at::Tensor copied = at::empty(x.sizes(), x.options().device(at::kCPU));
  const auto size = static_cast<int64_t>(x.nbytes());
  if (size == 0) return copied;
  const at::Tensor from = bytes_of(x.contiguous()), to = bytes_of(copied);
  const int64_t first = num_begun_, count = (size + piece_bytes_ - 1) / piece_bytes_;
  const auto part = [&](const at::Tensor& whole, int64_t number) {
    const int64_t begin = number * piece_bytes_;
    return whole.narrow(0, begin, std::min(piece_bytes_, size - begin));
  };
  const auto piece_of = [&](int64_t number) { return pieces_[static_cast<size_t>((first + number) % 2)]; };
  for (at::Tensor& piece : pieces_)
    if (!piece.defined()) piece = transfers_->allocate(piece_bytes_);
  for (int64_t number = 0; number <= count; ++number) {
    if (number < count) {
      const at::Tensor bytes = part(from, number);
      transfers_->begin(piece_of(number).narrow(0, 0, bytes.numel()), bytes);
      ++num_begun_;
    }
    if (number == 0) continue;
    transfers_->finish(first + number - 1);
    const at::Tensor arrived = part(to, number - 1);
    arrived.copy_(piece_of(number - 1).narrow(0, 0, arrived.numel()));
  }
  return copied;
}

}  // namespace bough
