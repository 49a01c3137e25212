// What a forward is given: sublayers with their weights, the rows of sequences, what adapters add to theirs, and the head.

#pragma once

#include "attention.h"
#include "choices.h"
#include "latent.h"
#include "low_rank.h"
#include "mixture.h"
#include "product.h"
#include "rows.h"

namespace {

struct AttentionWeights {
    Linear inputs, output;  // inputs: queries, keys and values
    Norm query_norm, key_norm;
    int norms_rows;  // the head norms run over the heads of a row together, not over each head
    int norms_last;  // they run after rope
    int neighbours;  // rope rotates neighbouring entries of a head
    Heads sizes;
    float scale, softcap;  // of the scores; no cap where it is 0
    const void* sinks;     // [heads], see ``Attention``; or null
    int layer;             // of the cache
};

// One branch: attention, an MLP, a mixture of experts or attention to latents; the others are null.
struct Sublayer {
    const AttentionWeights* attention;
    const MlpWeights* mlp;
    Norm before, after;
    float multiplier;  // of what is added to the stream
    int view, turn;    // of attention: indices; turn is -1 without rope
    long hidden;
    const MixtureWeights* mixture;
    const LatentWeights* latent;
};

// The rows of one sequence.
struct Part {
    void* const* caches;         // by layer [2, key_heads, capacity, head_dim], the last of them bytes where packed
    long capacity, start;        // slot of the first row
    long first_row, rows;        // in the stream
    const View* views;
    const AdaptedSublayer* adapter;  // by sublayer, or null
    const SeenBlocks* seen;  // what they see where there is no window; null for all
    float* shares;           // [layers, heads, share_blocks], see ``Attention``, of attention without a window; or null
    long share_blocks;
};

// Final norm and LM head, of all rows or of some.
struct Head {
    Norm norm;
    Linear linear;  // without weights the norm alone runs
    long hidden, outputs;
    const long* rows;    // of the stream, ascending, of which those below are; null for all
    long count;          // how many
    void* out;           // [rows, outputs], or [rows, hidden] of the norm alone
    long* tokens;        // of the largest logit of each row, or drawn; or null
    float* confidences;  // its probability, or null; not without tokens
    bool* finite;        // all logits of a row are numbers; not without tokens
    const Drawing* drawings;  // by row, or null
    float divisor, softcap;   // of the logits; no cap where it is 0
};

struct Forward {
    const Sublayer* sublayers;
    const int* which;  // the sublayers to run, ascending
    long count;
    void* const* kept;      // by place in ``which`` where the last rows of the stream before it are copied to, or null;
                            // null where none are
    const long* kept_rows;  // how many
    const Part* parts;
    long part_count;
    const CosSin* turns;    // of the rows of all parts
    int threads;
    const Head* head;  // or null
    int packed;        // keys and values are in 8 bits
    const Linear* entry;   // the stream is first computed by this product; or null
    const void* entering;  // [rows, 2 * hidden], from these rows
};

}  // namespace
