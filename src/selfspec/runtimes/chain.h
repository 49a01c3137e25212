// Chains of drafted tokens: forward after forward in one call, each over the tokens that the one before it chose; and
// the forward that verifies chains and trees of them.

#pragma once

#include <numeric>

#include "forward.h"
#include "packing.h"

namespace {

// A sequence whose tokens are drafted, or verified. The position of a row is its slot, but for the rows of a tree.
struct ChainSequence {
    void* const* caches;  // by layer [2, key_heads, capacity, head_dim]
    long capacity, start;  // slot of the first row
    long layers, planes, slot_bytes;  // of the caches: how many, [2, key_heads] of one, and a slot of one of these
    long limit;            // most tokens to draft, 1 or more
    long* tokens;          // [1 + limit], the last token of the text and then those that are drafted
    float* confidences;    // [limit]
    long* guesses;         // [limit], of the tokens after the last one, rows of the next forward
    long guess_count;
    long* siblings;        // [3], tokens that may come in place of the first guess, or null: rows of the next forward after
                           // those of the guesses
    long sibling_count;
    long* probes;          // [3], the rows of the next forward (0 is the last token's) after which a row without a token
                           // stands, or null: its last rows
    long probe_count;
    long* probed;                // [4], what may come by the probe that stands after the row of the last token, the likeliest
                                 // first; -1 after the last of them
    float* probed_confidences;   // and their probabilities; both null where there are no probes
    const void* mask_embedding;          // [hidden], the embedding of a token that is not known; null for zero
    Drawing drawing;        // of the first token
    const uint8_t** allowed;  // by row of the next forward as in ``Drawing``; null where all tokens are allowed in all rows
    void* const* captured;  // of a verification, by sublayer, and after the last, where h of its rows [1 + drafted, hidden]
                            // is copied to, or null; null where none is
    const long* depths;     // of the rows of a tree [1 + drafted], counted from the first; null for a chain
    const bool* visible;    // which of them each sees [1 + drafted, 1 + drafted]; null for a chain
    const AdaptedSublayer* adapter;  // by sublayer, or null
    const SeenBlocks* seen;  // as of a part
    float* shares;
    long share_blocks;
    long drafted, guessed, finite;  // tokens, how many of them were guessed, and how many from the first on were chosen from
                                    // logits that are all numbers: what comes out
};

constexpr long MOST_SIBLINGS = 3;

struct DraftHead;

struct Chain {
    const Forward* forward;   // without parts; its turns are tables from position 0 on; where it drafts, its head has no
                              // outputs
    const void* embedding;    // [tokens, hidden], or null
    const Linear* table;      // the same of few bits, where there is no embedding
    float scale;              // of embeddings
    const long* windows;      // by view, 0 for none
    long window_count;
    ChainSequence* sequences;
    long count;
    // Is called with each drafted token; returns whether the draft of its sequence ends with it.
    int (*follow)(long sequence, long token, float confidence);
    // Is called after each forward, with all of its tokens known: writes the guesses, siblings and probes of the next one of every
    // sequence that goes on, -1 guesses where its draft ends.
    void (*plan)();
    DraftHead* head;          // drafts guesses, see mtp.h; or null
};

// The forwards of chains.
template <class T> class Links {
  public:
    explicit Links(const Chain& chain) : chain(chain), f(*chain.forward), running(chain.count, true) {
        hidden = f.head->hidden;
        views.resize(chain.count * chain.window_count);
    }
    virtual ~Links() = default;

    void draft() {
        while (guess(), lay_out()) {
            advance(prepare_head());
            for (size_t part = 0; part < parts.size(); part++) take(part);
            chain.plan();
            for (long index = 0; index < chain.count; index++)
                running[index] = running[index] && chain.sequences[index].guess_count >= 0;
        }
    }
    // One forward over the last token of each sequence and what it drafted. The head has outputs for all of these rows.
    void verify() {
        for (long index = 0; index < chain.count; index++) {
            const ChainSequence& s = chain.sequences[index];
            add_part(index, s.start, s.tokens, s.tokens + 1, s.drafted);
            if (s.visible)
                set_tree(s, s.depths, [&s](long row, long other) { return s.visible[row * (1 + s.drafted) + other]; });
        }
        Head head = *f.head;
        head.drawings = drawings.data();
        advance(head);
        for (size_t part = 0; part < parts.size(); part++) take_states(parts[part], chain.sequences[of_part[part]]);
    }

  protected:
    Chain chain;
    const Forward& f;
    long hidden;
    std::vector<bool> running;
    // Of the coming forward, by part or by row.
    std::vector<const T*> mask_embeddings;
    std::vector<long> of_part;  // its sequence
    std::vector<Part> parts;
    std::vector<View> views;
    std::vector<T> stream, logits;
    std::vector<std::vector<char>> cosines, sines;  // by turn
    std::vector<std::vector<T>> states;             // by place, of those that are kept
    std::vector<std::unique_ptr<bool[]>> masks;     // of trees, by part and window
    std::vector<long> tokens, positions;
    std::vector<float> confidences;
    std::vector<Drawing> drawings;
    std::vector<std::vector<long>> paths;  // tokens before rows, by part or by row of a tree
    std::unique_ptr<bool[]> finite;
    const Linear* entry = nullptr;  // as of a forward, with the rows that it reads
    std::vector<T> joined;

    // Called before every forward; may write guesses.
    virtual void guess() {}
    // Called with each row whose token is taken; returns whether the draft of its sequence may go on.
    virtual bool take_row(long, long) { return true; }

    void clear_rows() {
        parts.clear(), of_part.clear(), tokens.clear(), positions.clear(), drawings.clear(), masks.clear();
        mask_embeddings.clear(), paths.clear();
    }
    // The rows of all sequences that go on: the last token of each, and guesses of the next ones.
    bool lay_out() {
        clear_rows();
        for (long index = 0; index < chain.count; index++) {
            const ChainSequence& s = chain.sequences[index];
            if (!running[index]) continue;
            add_part(index, s.start + s.drafted, s.tokens + s.drafted, s.guesses, s.guess_count);
            if (s.sibling_count || s.probe_count) add_branches(s);
        }
        return !parts.empty();
    }
    // A row of a token, and rows of those after it.
    void add_part(long index, long start, const long* token, const long* others, long count) {
        const ChainSequence& s = chain.sequences[index];
        View* own = views.data() + parts.size() * chain.window_count;
        for (long view = 0; view < chain.window_count; view++) {
            const long window = chain.windows[view];
            own[view] = {nullptr, window ? std::max(0L, start - window + 1) : 0, window};
        }
        parts.push_back({s.caches, s.capacity, start, long(tokens.size()), 1 + count, own, s.adapter, s.seen, s.shares, s.share_blocks});
        of_part.push_back(index);
        tokens.push_back(*token);
        tokens.insert(tokens.end(), others, others + count);
        const bool has_path = s.drawing.changes && s.tokens;
        const long drafted = start - s.start;
        if (has_path) paths.emplace_back(path_of(s, drafted, others, count));
        for (long row = 0; row <= count; row++) {
            positions.push_back(start + row);
            mask_embeddings.push_back(static_cast<const T*>(s.mask_embedding));
            drawings.push_back(s.drawing);
            drawings.back().position += drafted + row;
            if (has_path) set_path(drawings.back(), paths.back(), drafted + row);
            if (s.allowed) drawings.back().allowed = s.allowed[row];
        }
    }
    // What was drafted, and more tokens.
    static std::vector<long> path_of(const ChainSequence& s, long drafted, const long* others, long count) {
        std::vector<long> path(s.tokens + 1, s.tokens + 1 + drafted);
        path.insert(path.end(), others, others + count);
        return path;
    }
    static void set_path(Drawing& drawing, const std::vector<long>& path, long length) {
        drawing.path = path.data(), drawing.path_length = length;
    }
    // Adds tokens beside the first guess to the latest part, and rows without a token, which see up to the row before them.
    void add_branches(const ChainSequence& s) {
        const long chained = 1 + s.guess_count, known = chained + s.sibling_count;
        std::vector<long> depths(chained);
        std::iota(depths.begin(), depths.end(), 0);
        const auto add = [&](long token, long depth) {
            depths.push_back(depth);
            tokens.push_back(token), positions.push_back(0), drawings.push_back(s.drawing);
            mask_embeddings.push_back(static_cast<const T*>(s.mask_embedding));
        };
        for (long row = chained; row < known; row++) {
            add(s.siblings[row - chained], 1);
            if (s.allowed) drawings.back().allowed = s.allowed[row];
        }
        for (long probe = 0; probe < s.probe_count; probe++) add(-1, depths[s.probes[probe]] + 1);
        parts.back().rows += s.sibling_count + s.probe_count;
        const auto sees = [chained](long row, long other) { return row < chained ? other <= row : other == 0 || other == row; };
        set_tree(s, depths.data(), [&s, known, sees](long row, long other) {
            return row < known ? sees(row, other) : other == row || (other < known && sees(s.probes[row - known], other));
        });
    }
    // Makes the latest part a tree: its rows are at their depths, and see those above them.
    template <class Sees> void set_tree(const ChainSequence& s, const long* depths, const Sees& sees) {
        const Part& part = parts.back();
        const long rows = part.rows, first_row = part.first_row, start = part.start;
        for (long row = 0; row < rows; row++) {
            positions[first_row + row] = start + depths[row];
            Drawing& drawing = drawings[first_row + row];
            drawing.position = s.drawing.position + start - s.start + depths[row];
            if (!drawing.changes) continue;
            paths.emplace_back(path_of(s, start - s.start, nullptr, 0));
            for (long other = 1; other < rows; other++)
                if (tokens[first_row + other] >= 0 && sees(row, other)) paths.back().push_back(tokens[first_row + other]);
            set_path(drawing, paths.back(), paths.back().size());
        }
        for (long view = 0; view < chain.window_count; view++) {
            View& own = views[(parts.size() - 1) * chain.window_count + view];
            const long known = start - own.first, slots = known + rows;
            masks.emplace_back(new bool[rows * slots]);
            bool* mask = masks.back().get();
            for (long row = 0; row < rows; row++, mask += slots) {
                const long from = own.window ? start + depths[row] - own.window + 1 : 0;  // the first position
                for (long slot = 0; slot < known; slot++) mask[slot] = own.first + slot >= from;
                for (long other = 0; other < rows; other++)
                    mask[known + other] = sees(row, other) && start + depths[other] >= from;
            }
            own.visible = masks.back().get(), own.window = 0;
        }
    }

    // The head with outputs for the coming rows, or as many of them.
    Head prepare_head() { return prepare_head(tokens.size()); }
    Head prepare_head(long rows) {
        logits.resize(rows * f.head->outputs), confidences.resize(rows), finite.reset(new bool[rows]);
        Head head = *f.head;
        head.out = logits.data(), head.tokens = tokens.data(), head.confidences = confidences.data();
        head.finite = finite.get(), head.drawings = drawings.data();
        return head;
    }
    void advance(const Head& head) {
        const long rows = tokens.size();
        embed(rows);
        std::vector<CosSin> turns = turn();
        std::vector<void*> kept = keep(rows);
        std::vector<long> kept_rows(kept.size(), rows);
        Forward forward = f;
        forward.entry = entry, forward.entering = joined.data();
        forward.kept = kept.data(), forward.kept_rows = kept_rows.data();
        forward.parts = parts.data(), forward.part_count = parts.size();
        forward.turns = turns.data(), forward.head = &head;
        Team<T>(forward, stream.data(), rows).run();
    }
    virtual void embed(long rows) {
        const T* embedding = static_cast<const T*>(chain.embedding);
        stream.resize(rows * hidden);
        std::vector<int64_t> known(tokens.begin(), tokens.end());
        for (int64_t& token : known) token = std::max<int64_t>(token, 0);
        if (!embedding) unpack(*chain.table, known.data(), stream.data(), rows, hidden, 1);
        for (long row = 0; row < rows; row++) {
            T* to = stream.data() + row * hidden;
            if (tokens[row] < 0) {  // a probe
                if (mask_embeddings[row])
                    std::copy_n(mask_embeddings[row], hidden, to);
                else
                    std::fill_n(to, hidden, T());
                continue;
            }
            if (embedding) std::copy_n(embedding + tokens[row] * hidden, hidden, to);
            if (chain.scale != 1)
                for (long i = 0; i < hidden; i++) to[i] = down<T>(up(to[i]) * chain.scale);
        }
    }
    // The rotations of the rows.
    std::vector<CosSin> turn() {
        long kinds = 0;
        for (long i = 0; i < f.count; i++) kinds = std::max(kinds, 1L + f.sublayers[f.which[i]].turn);
        cosines.resize(kinds), sines.resize(kinds);
        std::vector<CosSin> turns;
        for (long kind = 0; kind < kinds; kind++) {
            const CosSin& table = f.turns[kind];
            const long size = table.dim * (table.is_float ? sizeof(float) : sizeof(T));
            gather(static_cast<const char*>(table.cosine), size, cosines[kind]);
            gather(static_cast<const char*>(table.sine), size, sines[kind]);
            turns.push_back({cosines[kind].data(), sines[kind].data(), table.dim, table.is_float});
        }
        return turns;
    }
    void gather(const char* table, long size, std::vector<char>& to) const {
        to.clear();
        for (const long position : positions)
            to.insert(to.end(), table + position * size, table + (position + 1) * size);
    }
    // Where the forward keeps states that any sequence captures, by place.
    std::vector<void*> keep(long rows) {
        states.resize(f.count);
        std::vector<void*> kept(f.count, nullptr);
        for (const long index : of_part)
            for (long place = 0; place < f.count; place++)
                if (const ChainSequence& s = chain.sequences[index]; s.captured && s.captured[place]) {
                    states[place].resize(rows * hidden);
                    kept[place] = states[place].data();
                }
        return kept;
    }

    // Takes the tokens that the rows of a part chose, up to the first that was not guessed.
    void take(long part) {
        ChainSequence& s = chain.sequences[of_part[part]];
        const long first = parts[part].first_row, guesses = s.guess_count, siblings = s.sibling_count, probes = s.probe_count;
        s.guess_count = s.sibling_count = s.probe_count = 0;
        for (long row = 0, next = 0; next >= 0; row = next) {
            const long token = tokens[first + row];
            s.finite += s.finite == s.drafted && finite[first + row];
            s.confidences[s.drafted++] = confidences[first + row];
            s.tokens[s.drafted] = token;
            s.guessed += row > 0;
            next = row < guesses && s.guesses[row] == token ? row + 1 : -1;
            for (long sibling = 0; sibling < siblings && row == 0 && next < 0; sibling++)
                if (s.siblings[sibling] == token) next = 1 + guesses + sibling;
            if (s.probed) *s.probed = -1;
            for (long probe = 0; probe < probes && next < 0; probe++)
                if (s.probes[probe] == row) read_probe(s, first + 1 + guesses + siblings + probe, token);
            const bool goes_on = take_row(of_part[part], first + row);
            const bool ends = chain.follow(of_part[part], token, confidences[first + row]) || s.drafted == s.limit || !goes_on;
            running[of_part[part]] = !ends;
            if (ends) return;
            if (next > guesses) move_slot(s, parts[part].start + next, parts[part].start + 1);
        }
    }
    // Moves the keys and values of a sibling to where those of the first guess are.
    static void move_slot(const ChainSequence& s, long from, long to) {
        for (long layer = 0; layer < s.layers; layer++)
            for (long plane = 0; plane < s.planes; plane++) {
                char* slots = static_cast<char*>(s.caches[layer]) + plane * s.capacity * s.slot_bytes;
                std::copy_n(slots + from * s.slot_bytes, s.slot_bytes, slots + to * s.slot_bytes);
            }
    }
    // What may come by a probe: the token that it chose, or if that is the token which has been chosen for its own place
    // meanwhile, the likeliest other one; and then others, the likeliest first.
    void read_probe(const ChainSequence& s, long row, long token) const {
        const long outputs = f.head->outputs;
        const T* own = logits.data() + row * outputs;
        const float confidence = confidences[row];
        long count = 0;
        const auto write = [&](long other, float below) {
            s.probed[count] = other, s.probed_confidences[count++] = confidence * exponential(below);
        };
        if (tokens[row] != token) {
            write(tokens[row], 0);
        } else {
            Choice other = token ? choose(own, 0, token, false) : choose(own, 1, outputs, false);
            if (token && token + 1 < outputs) other = join(other, choose(own, token + 1, outputs, false));
            write(other.token, other.largest - std::max(other.largest, up(own[token])));
        }
        Draw likely[2 + MOST_SIBLINGS];
        const long found = most_likely(own, outputs, drawings[row], likely, 2 + MOST_SIBLINGS);
        for (long i = 0; i < found && count < 1 + MOST_SIBLINGS; i++)
            if (likely[i].token != token && likely[i].token != s.probed[0]) write(likely[i].token, likely[i].largest - likely[0].largest);
        if (count < 1 + MOST_SIBLINGS) s.probed[count] = -1;
    }
    // Copies the captured states of the rows of a part.
    void take_states(const Part& part, const ChainSequence& s) const {
        if (!s.captured) return;
        for (long place = 0; place <= f.count; place++) {
            const T* from = (place < f.count ? states[place] : stream).data() + part.first_row * hidden;
            if (s.captured[place]) std::copy_n(from, part.rows * hidden, static_cast<T*>(s.captured[place]));
        }
    }
};

}  // namespace
