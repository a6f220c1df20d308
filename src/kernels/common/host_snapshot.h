// Copies of device tensors in host memory, so that no second copy is on the device: for weights that wait for
// an engine (PinnedPieces), and for checkpoints that are written while training goes on (HostCopier).
//
// Copies between a GPU and pinned memory run at the full rate of the bus, others are slower. libtorch rounds
// the size of a pinned allocation up to a power of two. Both classes therefore allocate pieces whose size is
// such a power.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace bough {

// Returns memory of the host [bytes], pinned for transfers to and from the device.
at::Tensor allocate_pinned(int64_t bytes);

// A range of bytes in pinned memory that tensors are written to and read from.
class PinnedPieces {
 public:
  static constexpr int64_t kPieceBytes = int64_t{256} << 20;
  // The memory is allocated here and kept. allocate, piece_bytes: replaced by tests.
  explicit PinnedPieces(int64_t bytes, const std::function<at::Tensor(int64_t)>& allocate = allocate_pinned,
                        int64_t piece_bytes = kPieceBytes);

  // Copies the contiguous tensor's bytes to [offset, offset + nbytes), or back. On a GPU the copy is queued
  // on the current stream: the caller waits (synchronize_stream()) before the host or other streams use them.
  void store(int64_t offset, const at::Tensor& from);
  void load(int64_t offset, const at::Tensor& to) const;

  int64_t num_bytes() const { return num_bytes_; }

 private:
  // Calls use(piece's bytes, tensor's bytes) for each part of the tensor that lies in one piece.
  void for_each_part(int64_t offset, const at::Tensor& tensor,
                     const std::function<void(const at::Tensor&, const at::Tensor&)>& use) const;

  const int64_t num_bytes_, piece_bytes_;
  std::vector<at::Tensor> pieces_;
};

// The copies of a HostCopier, numbered from 0. At most two are pending.
class DeviceToHost {
 public:
  virtual ~DeviceToHost() = default;
  virtual at::Tensor allocate(int64_t bytes) = 0;                        // pinned
  virtual void begin(const at::Tensor& to, const at::Tensor& from) = 0;  // the next copy
  virtual void finish(int64_t number) = 0;                               // waits until the copy is done
};

// Copies tensors to ordinary host memory, which the caller frees, through two pinned pieces: while one piece
// arrives, the other is moved on. A tensor on the CPU is cloned.
class HostCopier {
 public:
  static constexpr int64_t kPieceBytes = int64_t{32} << 20;
  // transfers, piece_bytes: replaced by tests. Without transfers, tensors on the CPU are cloned.
  explicit HostCopier(std::unique_ptr<DeviceToHost> transfers = nullptr, int64_t piece_bytes = kPieceBytes)
      : transfers_(std::move(transfers)), piece_bytes_(piece_bytes) {}

  // Returns a contiguous copy on the CPU with the same bits. Waits until it is complete.
  at::Tensor copy(const at::Tensor& x);

 private:
  std::unique_ptr<DeviceToHost> transfers_;
  const int64_t piece_bytes_;
  std::array<at::Tensor, 2> pieces_;
  int64_t num_begun_ = 0;
};

}  // namespace bough
