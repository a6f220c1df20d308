#include "kernels/common/host_snapshot.h"

#include <ATen/ATen.h>

#include "kernels/common/device.h"
#include "kernels/common/device_test.h"

namespace bough {
namespace {

// Counts what a HostCopier asks for. The bytes of a copy arrive only in finish(), as on a GPU.
class CountingTransfers final : public DeviceToHost {
 public:
  struct Counts {
    int64_t allocated = 0, copies = 0, bytes = 0, most_pending = 0;
  };
  explicit CountingTransfers(Counts& counts) : counts_(counts) {}

  at::Tensor allocate(int64_t bytes) override {
    counts_.allocated += bytes;
    return at::full({bytes}, 0xAB, at::kByte);
  }
  void begin(const at::Tensor& to, const at::Tensor& from) override {
    ++counts_.copies;
    counts_.bytes += from.numel();
    pending_.emplace_back(to, from);
    counts_.most_pending = std::max(counts_.most_pending, static_cast<int64_t>(pending_.size()));
  }
  void finish(int64_t number) override {
    ASSERT_EQ(number, num_finished_++);
    pending_.front().first.copy_(pending_.front().second);
    pending_.erase(pending_.begin());
  }

 private:
  Counts& counts_;
  std::vector<std::pair<at::Tensor, at::Tensor>> pending_;
  int64_t num_finished_ = 0;
};

TEST(HostCopier, CopiesThroughTwoPieces) {
  CountingTransfers::Counts counts;
  HostCopier copier(std::make_unique<CountingTransfers>(counts), /*piece_bytes=*/64);
  int64_t bytes = 0;
  for (const int64_t size : {0, 1, 15, 16, 17, 31, 32, 33, 100, 1}) {
    const at::Tensor x = at::randn({size});
    const at::Tensor copied = copier.copy(x);
    ASSERT_TRUE(copied.equal(x)) << size;
    EXPECT_TRUE(size == 0 || copied.data_ptr() != x.data_ptr());
    bytes += 4 * size;
  }
  EXPECT_EQ(counts.bytes, bytes);
  EXPECT_EQ(counts.allocated, 128) << "two pieces, whatever is copied";
  EXPECT_EQ(counts.most_pending, 2);
  const at::Tensor wide = at::randn({6, 40}).to(at::kBFloat16);
  EXPECT_TRUE(copier.copy(wide.narrow(1, 3, 20)).equal(wide.narrow(1, 3, 20)));
}

TEST(HostCopier, ClonesATensorOnTheCpu) {
  const at::Tensor x = at::randn({5, 7});
  const at::Tensor copied = HostCopier().copy(x);
  EXPECT_TRUE(copied.equal(x));
  EXPECT_NE(copied.data_ptr(), x.data_ptr());
}

TEST(PinnedPieces, HoldTensorsThatCrossPieces) {
  std::vector<int64_t> allocated;
  const auto allocate = [&](int64_t bytes) {
    allocated.push_back(bytes);
    return at::zeros({bytes}, at::kByte);
  };
  std::vector<at::Tensor> tensors;
  for (const int64_t size : {3, 0, 40, 16, 1, 9}) tensors.push_back(at::randn({size}));
  PinnedPieces pieces(4 * 69, allocate, /*piece_bytes=*/64);
  EXPECT_EQ(allocated, (std::vector<int64_t>{64, 64, 64, 64, 20}));
  int64_t offset = 0;
  for (const at::Tensor& tensor : tensors) {
    pieces.store(offset, tensor);
    offset += static_cast<int64_t>(tensor.nbytes());
  }
  EXPECT_EQ(offset, pieces.num_bytes());
  for (auto tensor = tensors.rbegin(); tensor != tensors.rend(); ++tensor) {
    offset -= static_cast<int64_t>(tensor->nbytes());
    const at::Tensor loaded = at::zeros_like(*tensor);
    pieces.load(offset, loaded);
    EXPECT_TRUE(loaded.equal(*tensor));
  }
  EXPECT_THROW(pieces.load(1, at::zeros({69})), InternalError);
}

using CudaHostSnapshot = OnCuda;

TEST_F(CudaHostSnapshot, HasTheBitsOfTheDevice) {
  const at::Tensor x = on_gpu(at::randn({(int64_t{20} << 20) + 3}));  // more than two pieces
  const at::Tensor expected = x.cpu();
  const PeakBytes peak(at::kCUDA);
  HostCopier copier;
  EXPECT_TRUE(copier.copy(x).equal(expected));
  EXPECT_TRUE(copier.copy(x.narrow(0, 1, 1000)).equal(expected.narrow(0, 1, 1000)));
  EXPECT_EQ(peak.bytes(), 0) << "nothing more on the device";
  PinnedPieces pieces(static_cast<int64_t>(x.nbytes()));
  pieces.store(0, x);
  x.zero_();
  pieces.load(0, x);
  EXPECT_TRUE(x.cpu().equal(expected));
}

}  // namespace
}  // namespace bough
