#include "net/line_splitter.h"

#include <gtest/gtest.h>

#include <vector>

namespace bough {
namespace {

TEST(LineSplitter, ATooLongLineIsRefusedEvenInOnePiece) {
  LineSplitter splitter;
  std::string line(kMaxReplyBytes + 1, 'x');
  line += '\n';
  splitter.append(line);
  EXPECT_FALSE(splitter.next());
  EXPECT_TRUE(splitter.overflowed());
}

TEST(LineSplitter, LinesDoNotDependOnThePieces) {
  const std::string stream = "one\n\ntwo and more\nrest";
  for (size_t piece = 1; piece <= stream.size(); ++piece) {
    LineSplitter splitter;
    std::vector<std::string> lines;
    for (size_t i = 0; i < stream.size(); i += piece) {
      splitter.append(std::string_view(stream).substr(i, piece));
      while (auto line = splitter.next()) lines.push_back(*line);
    }
    EXPECT_EQ(lines, (std::vector<std::string>{"one", "", "two and more"})) << piece;
    EXPECT_FALSE(splitter.overflowed());
  }
}

TEST(LineSplitter, AnEndlessLineIsNotStored) {
  LineSplitter splitter;
  const std::string piece(1 << 16, 'x');
  for (int i = 0; i < 17; ++i) {
    EXPECT_FALSE(splitter.overflowed()) << i;
    splitter.append(piece);
    EXPECT_FALSE(splitter.next());
  }
  EXPECT_TRUE(splitter.overflowed());
}

}  // namespace
}  // namespace bough
