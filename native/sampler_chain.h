// llama.cpp's samplers and orders of them, with the results of quire.executors.sampler, bit for
// bit. Rows without them never come here: see sampler.cpp.
#pragma once
#include <cstdint>

#include "sampler.h"

namespace quire {

// Subtracts DRY's penalties: see quire.executors.dry.
void apply_dry(float* scores, const SampleRequest& request, SampleScratch& scratch);

// Repetition counts prompt and completion, frequency and presence the completion alone; with
// repeat_last_n all count the last tokens of both.
void apply_penalties(float* scores, const SampleRequest& request, SampleScratch& scratch);

// Applies the samplers of settings.chain in their order to scores that had mask, bans and bias,
// and draws. Overwrites the scores.
SampleResult choose_by_chain(float* scores, int64_t size, const SampleRequest& request,
                             SampleScratch& scratch);

}  // namespace quire
