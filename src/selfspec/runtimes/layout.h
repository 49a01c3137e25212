// What the Python code reads from the headers or repeats of them: sizes of structures, and constants. structures.py compares
// them when it loads the library; the number of its sources says that it has the headers beside that file.

#pragma once

#include "mtp.h"
#include "state_net.h"

#ifndef SOURCES
#define SOURCES 0
#endif

namespace {

struct Fact {
    const char* name;
    long value;
};

#define SIZE(S) {#S, long(sizeof(S))}
#define CONSTANT(NAME) {#NAME, long(NAME)}
#define FORMAT(NAME)                                                                                                   \
    {"format." #NAME, long(NAME)}, {"inputs." #NAME, long(Format<NAME>::unit)}, {"bytes." #NAME, Format<NAME>::bytes}

constexpr Fact LAYOUT[] = {
    SIZE(Linear), SIZE(Stored), SIZE(Norm), SIZE(Heads), SIZE(AttentionWeights), SIZE(MlpWeights), SIZE(MixtureWeights),
    SIZE(Sublayer), SIZE(LatentWeights), SIZE(StateNet), SIZE(View), SIZE(CosSin), SIZE(SeenBlocks), SIZE(Part), SIZE(LowRankOutputs),
    SIZE(LowRank), SIZE(AdaptedSublayer), SIZE(Changes), SIZE(Drawing), SIZE(Head), SIZE(Forward), SIZE(ChainSequence), SIZE(Chain),
    SIZE(HeadEntry), SIZE(HeadText), SIZE(DraftHead),
    CONSTANT(SOURCES), CONSTANT(BLOCK), CONSTANT(TILE), CONSTANT(VERIFIED), CONSTANT(MOST_DIM), CONSTANT(DIM_STEP),
    CONSTANT(SHARED), CONSTANT(SEEN), CONSTANT(MOST_SIBLINGS), CONSTANT(SILU), CONSTANT(GELU_TANH), CONSTANT(RELU_SQUARED), CONSTANT(CLAMPED_GLU), CONSTANT(RMS_NORM), CONSTANT(LAYER_NORM),
    FORMAT(SYMMETRIC4), FORMAT(SYMMETRIC6), FORMAT(SYMMETRIC8), FORMAT(Q4_0), FORMAT(Q4_1), FORMAT(Q5_0), FORMAT(Q5_1),
    FORMAT(Q8_0), FORMAT(Q2_K), FORMAT(Q3_K), FORMAT(Q4_K), FORMAT(Q5_K), FORMAT(Q6_K), FORMAT(IQ4_NL), FORMAT(IQ4_XS),
    FORMAT(GRID2), FORMAT(GRID3), FORMAT(GRID4), FORMAT(GRID8), FORMAT(F16), FORMAT(BF16), FORMAT(F32), FORMAT(MXFP4),
    {nullptr, 0},
};

#undef SIZE
#undef CONSTANT
#undef FORMAT

}  // namespace

// Ends with a fact without a name.
extern "C" const Fact* layout() { return LAYOUT; }
