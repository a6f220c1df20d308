#include "data/rollout_file.h"

#include <zstd.h>

#include <algorithm>
#include <memory>
#include <string_view>

#include "base/error.h"
#include "base/file.h"

namespace bough {

namespace {

// Decompressed bytes per piece: large enough to make system calls cheap, small enough to parse the text while
// it is in the CPU cache.
constexpr size_t kChunk = size_t{1} << 20;

bool is_compressed(const std::filesystem::path& path) {
  return path.extension() == ".zst";
}

// The lines of a file, decompressed while reading. Memory holds a piece and at most the longest line.
class LineSource {
 public:
  explicit LineSource(const std::filesystem::path& path) : path_(path), file_(path) {
    if (!is_compressed(path)) return;
    stream_.reset(ZSTD_createDStream());
    BOUGH_CHECK(stream_ != nullptr, "ZSTD_createDStream failed");
    compressed_ = {file_.data(), file_.size(), 0};
  }

  // Sets `line` to the next line without its line break. It is valid until the next call. Returns false after
  // the last line.
  bool next(std::string_view& line) {
    if (!stream_) return cut(file_.text(), line);
    size_t searched = begin_;
    while (true) {
      const size_t stop = buffer_.find('\n', searched);
      if (stop != std::string::npos || finished_) return cut(buffer_, line);
      searched = buffer_.size() - begin_;
      buffer_.erase(0, begin_);
      begin_ = 0;
      decompress();
    }
  }

 private:
  bool cut(std::string_view text, std::string_view& line) {
    if (begin_ >= text.size()) return false;
    const size_t stop = std::min(text.find('\n', begin_), text.size());
    line = text.substr(begin_, stop - begin_);
    begin_ = stop + 1;
    return true;
  }

  void decompress() {
    const size_t old_size = buffer_.size();
    buffer_.resize(old_size + kChunk);
    ZSTD_outBuffer out{buffer_.data() + old_size, kChunk, 0};
    while (out.pos == 0 && !finished_) {
      // A zstd file consists of one or more frames. It is complete only if it ends at the end of a frame.
      if (compressed_.pos == compressed_.size && frame_ended_) {
        finished_ = true;
        break;
      }
      const size_t left = ZSTD_decompressStream(stream_.get(), &out, &compressed_);
      if (ZSTD_isError(left))
        throw UserError(str(path_.string(), ": the zstd file is damaged: ", ZSTD_getErrorName(left),
                            " near byte ", compressed_.pos, " of ", compressed_.size, "; write it again"));
      frame_ended_ = left == 0;
      if (out.pos == 0 && compressed_.pos == compressed_.size && !frame_ended_)
        throw UserError(str(path_.string(), ": the zstd file is cut off after ", compressed_.size,
                            " bytes, in the middle of a frame; write it again"));
    }
    buffer_.resize(old_size + out.pos);
  }

  struct FreeStream {
    void operator()(ZSTD_DStream* stream) const { ZSTD_freeDStream(stream); }
  };

  std::filesystem::path path_;
  MappedFile file_;
  // nullptr for plain text, which is read from the mapped file without decompression
  std::unique_ptr<ZSTD_DStream, FreeStream> stream_;
  ZSTD_inBuffer compressed_{};
  std::string buffer_;  // decompressed text; bytes before begin_ were already returned
  size_t begin_ = 0;
  bool frame_ended_ = false;
  bool finished_ = false;
};

// Writes text to a file, compressed if the file name says so.
class LineSink {
 public:
  explicit LineSink(const std::filesystem::path& path) : file_(path) {
    if (!is_compressed(path)) return;
    stream_.reset(ZSTD_createCCtx());
    BOUGH_CHECK(stream_ != nullptr, "ZSTD_createCCtx failed");
    check(ZSTD_CCtx_setParameter(stream_.get(), ZSTD_c_checksumFlag, 1));
    out_.resize(ZSTD_CStreamOutSize());
  }
  void write(std::string_view text) { stream_ ? compress(text, ZSTD_e_continue) : file_.write(text); }
  void commit() {
    if (stream_) compress({}, ZSTD_e_end);
    file_.commit();
  }

 private:
  static size_t check(size_t result) {
    BOUGH_CHECK(!ZSTD_isError(result), "zstd: ", ZSTD_getErrorName(result));
    return result;
  }
  void compress(std::string_view text, ZSTD_EndDirective directive) {
    ZSTD_inBuffer in{text.data(), text.size(), 0};
    bool done = false;
    while (!done) {
      ZSTD_outBuffer out{out_.data(), out_.size(), 0};
      const size_t left = check(ZSTD_compressStream2(stream_.get(), &out, &in, directive));
      file_.write(out_.data(), out.pos);
      done = directive == ZSTD_e_end ? left == 0 : in.pos == in.size;
    }
  }

  struct FreeContext {
    void operator()(ZSTD_CCtx* context) const { ZSTD_freeCCtx(context); }
  };

  AtomicFile file_;
  std::unique_ptr<ZSTD_CCtx, FreeContext> stream_;  // nullptr for plain text
  std::string out_;
};

}  // namespace

std::vector<Trajectory> read_rollouts(const std::filesystem::path& path, const RolloutReadOptions& options) {
  LineSource source(path);
  std::vector<Trajectory> rollouts;
  std::string_view line;
  int64_t first_line = 0;
  for (int64_t number = 1; source.next(line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const std::string where = str(path.string(), ", line ", number);
    rollouts.push_back(parse_rollout_line(line, where, options));
    if (rollouts.size() == 1) first_line = number;
    if (rollouts.back().temperature != rollouts.front().temperature)
      throw UserError(str(where, ", field 'temperature': got ", rollouts.back().temperature, "; expected ",
                          rollouts.front().temperature, " as in line ", first_line,
                          " (default 1): all rollouts of a batch need the same temperature; split the file"));
  }
  if (rollouts.empty())
    throw UserError(str(path.string(), ": got no rollouts; expected JSON Lines, one sequence per line"));
  return rollouts;
}

void write_rollouts(const std::filesystem::path& path, const std::vector<Trajectory>& rollouts) {
  LineSink sink(path);
  std::string text;
  for (const Trajectory& rollout : rollouts) {
    append_rollout_line(text, rollout);
    text += '\n';
    if (text.size() < kChunk) continue;
    sink.write(text);
    text.clear();
  }
  sink.write(text);
  sink.commit();
}

Json rollout_to_json(const Trajectory& rollout) {
  std::string text;
  append_rollout_line(text, rollout);
  return Json::parse(text);
}

Trajectory parse_rollout(const Json& line, const std::string& where, const RolloutReadOptions& options) {
  return parse_rollout_line(dump_line(line), where, options);
}

}  // namespace bough
