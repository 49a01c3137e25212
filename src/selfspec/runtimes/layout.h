// What the Python code repeats of the headers, or reads from them: sizes and fields of structures, and constants.
// structures.py compares them when it loads the library.

#pragma once

#include <cstddef>

#include "mtp.h"
#include "state_net.h"

namespace {

struct Fact {
    const char* name;
    long value;
};

#define SIZE(S) {#S, long(sizeof(S))}
#define AT(S, FIELD) {#S "." #FIELD, long(offsetof(S, FIELD))}
#define CONSTANT(NAME) {#NAME, long(NAME)}
#define FORMAT(NAME)                                                                                                   \
    {"format." #NAME, long(NAME)}, {"inputs." #NAME, long(Format<NAME>::unit)}, {"bytes." #NAME, Format<NAME>::bytes}

constexpr Fact LAYOUT[] = {
    SIZE(Linear), AT(Linear, weights), AT(Linear, bias), AT(Linear, parts), AT(Linear, count),
    AT(Linear, short_rows), AT(Linear, order),
    SIZE(Stored), AT(Stored, tiles), AT(Stored, outputs), AT(Stored, format),
    SIZE(Norm), AT(Norm, weight), AT(Norm, bias), AT(Norm, epsilon), AT(Norm, kind), AT(Norm, rounds), AT(Norm, added),
    SIZE(Heads), AT(Heads, heads), AT(Heads, key_heads), AT(Heads, dim), AT(Heads, shared),
    SIZE(AttentionWeights), AT(AttentionWeights, inputs), AT(AttentionWeights, output),
    AT(AttentionWeights, query_norm), AT(AttentionWeights, key_norm), AT(AttentionWeights, norms_rows),
    AT(AttentionWeights, norms_last), AT(AttentionWeights, neighbours),
    AT(AttentionWeights, sizes), AT(AttentionWeights, scale), AT(AttentionWeights, softcap),
    AT(AttentionWeights, sinks), AT(AttentionWeights, layer),
    SIZE(MlpWeights), AT(MlpWeights, gate_up), AT(MlpWeights, down), AT(MlpWeights, inner), AT(MlpWeights, activation),
    AT(MlpWeights, gated), AT(MlpWeights, alpha), AT(MlpWeights, limit),
    SIZE(MixtureWeights), AT(MixtureWeights, router), AT(MixtureWeights, experts), AT(MixtureWeights, shared),
    AT(MixtureWeights, count), AT(MixtureWeights, top), AT(MixtureWeights, normalizes),
    AT(MixtureWeights, sigmoid), AT(MixtureWeights, bias), AT(MixtureWeights, groups), AT(MixtureWeights, kept),
    AT(MixtureWeights, best_of_group), AT(MixtureWeights, scale), AT(MixtureWeights, exact), AT(MixtureWeights, shared_gated),
    SIZE(Sublayer), AT(Sublayer, attention), AT(Sublayer, mlp), AT(Sublayer, before), AT(Sublayer, after),
    AT(Sublayer, multiplier), AT(Sublayer, view), AT(Sublayer, turn), AT(Sublayer, hidden), AT(Sublayer, mixture),
    AT(Sublayer, latent),
    SIZE(LatentWeights), AT(LatentWeights, inputs), AT(LatentWeights, queries), AT(LatentWeights, output),
    AT(LatentWeights, expanding), AT(LatentWeights, query_norm), AT(LatentWeights, latent_norm), AT(LatentWeights, rank),
    AT(LatentWeights, heads), AT(LatentWeights, key), AT(LatentWeights, value), AT(LatentWeights, turned),
    AT(LatentWeights, latent), AT(LatentWeights, halves), AT(LatentWeights, scale), AT(LatentWeights, layer),
    SIZE(StateNet), AT(StateNet, conv), AT(StateNet, conv_bias), AT(StateNet, decay), AT(StateNet, bias),
    AT(StateNet, skip), AT(StateNet, norm), AT(StateNet, epsilon), AT(StateNet, lowest), AT(StateNet, highest),
    AT(StateNet, queries), AT(StateNet, keys), AT(StateNet, values), AT(StateNet, groups), AT(StateNet, heads),
    AT(StateNet, state), AT(StateNet, size), AT(StateNet, taps), AT(StateNet, delta),
    SIZE(View), AT(View, visible), AT(View, first), AT(View, window),
    SIZE(CosSin), AT(CosSin, cosine), AT(CosSin, sine), AT(CosSin, dim), AT(CosSin, is_float),
    SIZE(Part), AT(Part, caches), AT(Part, capacity), AT(Part, start), AT(Part, first_row), AT(Part, rows),
    AT(Part, views), AT(Part, adapter),
    SIZE(LowRankOutputs), AT(LowRankOutputs, weights), AT(LowRankOutputs, rank), AT(LowRankOutputs, outputs),
    AT(LowRankOutputs, first), AT(LowRankOutputs, scale),
    SIZE(LowRank), AT(LowRank, inputs), AT(LowRank, rank), AT(LowRank, outputs), AT(LowRank, count),
    SIZE(AdaptedSublayer), AT(AdaptedSublayer, entering), AT(AdaptedSublayer, leaving),
    SIZE(Drawing), AT(Drawing, key), AT(Drawing, position), AT(Drawing, temperature),
    SIZE(Head), AT(Head, norm), AT(Head, linear), AT(Head, hidden), AT(Head, outputs), AT(Head, rows), AT(Head, count), AT(Head, out), AT(Head, tokens),
    AT(Head, confidences), AT(Head, finite), AT(Head, drawings), AT(Head, divisor), AT(Head, softcap),
    SIZE(Forward), AT(Forward, sublayers), AT(Forward, which), AT(Forward, count), AT(Forward, kept),
    AT(Forward, kept_rows), AT(Forward, parts), AT(Forward, part_count), AT(Forward, turns), AT(Forward, threads),
    AT(Forward, head), AT(Forward, packed), AT(Forward, entry), AT(Forward, entering),
    SIZE(ChainSequence), AT(ChainSequence, caches), AT(ChainSequence, capacity), AT(ChainSequence, start),
    AT(ChainSequence, limit), AT(ChainSequence, tokens), AT(ChainSequence, confidences), AT(ChainSequence, guesses),
    AT(ChainSequence, guess_count), AT(ChainSequence, probes), AT(ChainSequence, probe_count), AT(ChainSequence, probed),
    AT(ChainSequence, probed_confidence), AT(ChainSequence, mask_embedding), AT(ChainSequence, drawing), AT(ChainSequence, kept),
    AT(ChainSequence, drafted), AT(ChainSequence, depths), AT(ChainSequence, visible), AT(ChainSequence, adapter), AT(ChainSequence, guessed), AT(ChainSequence, finite),
    SIZE(Chain), AT(Chain, forward), AT(Chain, embedding), AT(Chain, table), AT(Chain, scale), AT(Chain, windows),
    AT(Chain, window_count), AT(Chain, sequences), AT(Chain, count), AT(Chain, follow), AT(Chain, plan),
    AT(Chain, head),
    SIZE(HeadEntry), AT(HeadEntry, projection), AT(HeadEntry, token_norm), AT(HeadEntry, state_norm),
    AT(HeadEntry, state_first), AT(HeadEntry, hidden),
    SIZE(HeadText), AT(HeadText, caches), AT(HeadText, capacity), AT(HeadText, start), AT(HeadText, states),
    AT(HeadText, tokens), AT(HeadText, missing), AT(HeadText, limit),
    SIZE(DraftHead), AT(DraftHead, chain), AT(DraftHead, entry), AT(DraftHead, texts), AT(DraftHead, seconds),
    CONSTANT(BLOCK), CONSTANT(TILE), CONSTANT(VERIFIED), CONSTANT(MOST_DIM), CONSTANT(DIM_STEP),
    CONSTANT(SHARED), CONSTANT(SILU), CONSTANT(GELU_TANH), CONSTANT(RELU_SQUARED), CONSTANT(CLAMPED_GLU), CONSTANT(RMS_NORM), CONSTANT(LAYER_NORM),
    FORMAT(SYMMETRIC4), FORMAT(SYMMETRIC6), FORMAT(SYMMETRIC8), FORMAT(Q4_0), FORMAT(Q4_1), FORMAT(Q5_0), FORMAT(Q5_1),
    FORMAT(Q8_0), FORMAT(Q2_K), FORMAT(Q3_K), FORMAT(Q4_K), FORMAT(Q5_K), FORMAT(Q6_K), FORMAT(IQ4_NL), FORMAT(IQ4_XS),
    FORMAT(GRID2), FORMAT(GRID3), FORMAT(GRID4), FORMAT(GRID8), FORMAT(F16), FORMAT(BF16), FORMAT(F32), FORMAT(MXFP4),
    {nullptr, 0},
};

#undef SIZE
#undef AT
#undef CONSTANT
#undef FORMAT

}  // namespace

// Ends with a fact without a name.
extern "C" const Fact* layout() { return LAYOUT; }
