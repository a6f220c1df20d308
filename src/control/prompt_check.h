// Checks before a run that every prompt of a data set can be encoded and fits the model's context.
#pragma once

#include <filesystem>
#include <string>

#include "control/prompt_encoder.h"
#include "data/dataset.h"
#include "engine/engine.h"

namespace bough {

struct PromptCheckOptions {
  std::string key = "train_dataset";  // settings of the data set, in messages
  std::filesystem::path model;        // directory of the tokenizer and the chat template
  ModelLimits limits;                 // of the model that generates
  bool shows_progress = true;
};

// Encodes all prompts, in parallel, and treats those that are too long by settings.overlong_prompts: throws
// UserError with the first one's file and line, leaves them out, or marks plain prompts to be cut
// (Problem::truncate_to). A prompt may have settings.max_length tokens, and one less than the model's
// context, because a response needs a token. Logs how many prompts were too long, and the longest. Throws
// UserError, with file and line, if a prompt cannot be encoded, and if no problem is left. If encoding
// takes longer than a second, the lengths are kept in cache_folder() (base/file.h), by the content of the
// data set and of the model's tokenizer and template.
Dataset fit_prompts(const Dataset& dataset, const DatasetSettings& settings, const PromptEncoder& encoder,
                    const PromptCheckOptions& options);

// The file of these lengths; empty if there is no cache.
std::filesystem::path prompt_length_file(const Dataset& dataset, const std::filesystem::path& model);

}  // namespace bough
