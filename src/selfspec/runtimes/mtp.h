// Multi-token-prediction heads: models of one layer whose rows are made of the target's hidden state of a token and the
// embedding of the token after it. They draft the guesses of a chain of the target.

#pragma once

#include <chrono>

#include "chain.h"

namespace {

// What enters the layer of a head.
struct HeadEntry {
    Linear projection;  // [hidden, 2 * hidden]
    Norm token_norm, state_norm;
    int state_first;    // the projection reads the hidden state before the embedding
    long hidden;
};

// What a head knows of a sequence.
struct HeadText {
    void* const* caches;    // as of ``ChainSequence``; null where no head drafts
    long capacity, start;   // slot of the first row that is not in the cache
    void* states;           // [room, hidden], what these rows are made of: hidden states after the target's final norm
    long* tokens;           // [room], and the token after each
    long missing;           // how many there are
    long limit;             // most tokens to draft before the target's next forward, 0 for none
};

struct DraftHead {
    const Chain* chain;  // of the head, without sequences; ``follow`` is called with each of its tokens, as in a chain
    HeadEntry entry;
    HeadText* texts;     // of the target's sequences
    double seconds;      // that it took: what comes out
};

// Norms what the projection reads: rows of ``joined``, [rows, 2 * hidden].
template <class T>
void join_rows(const HeadEntry& entry, const T* embeddings, const T* states, std::vector<T>& joined, long rows) {
    const long hidden = entry.hidden;
    joined.resize(rows * 2 * hidden);
    for (long row = 0; row < rows; row++) {
        T* to = joined.data() + row * 2 * hidden;
        normalize<T>(entry.token_norm, embeddings + row * hidden, to + (entry.state_first ? hidden : 0), hidden);
        normalize<T>(entry.state_norm, states + row * hidden, to + (entry.state_first ? 0 : hidden), hidden);
    }
}
// Makes rows of the head's residual stream.
template <class T>
void enter_head(const HeadEntry& entry, const T* embeddings, const T* states, T* stream, long rows, int threads) {
    std::vector<T> joined;
    join_rows<T>(entry, embeddings, states, joined, rows);
    product<T>(entry.projection, joined.data(), stream, rows, 2 * entry.hidden, entry.hidden, threads);
}

// The forwards of a head.
template <class T> class HeadLinks : public Links<T> {
    using Links<T>::chain, Links<T>::hidden, Links<T>::parts, Links<T>::of_part, Links<T>::tokens, Links<T>::stream;

  public:
    HeadLinks(const DraftHead& head, long count) : Links<T>(with_count(*head.chain, count)), head(head), sequences(count), after(count) {
        chain.sequences = sequences.data(), this->entry = &head.entry.projection;
    }

    // Drafts for those of the target's sequences that go on: writes guesses of their next tokens.
    void draft_for(ChainSequence* targets, const std::vector<bool>& going) {
        std::vector<long> drafting;
        for (size_t index = 0; index < going.size(); index++)
            if (going[index] && head.texts[index].caches && head.texts[index].limit > 0) drafting.push_back(index);
        for (const long index : drafting) begin(index, targets[index]);
        for (bool first = true; !drafting.empty(); first = false) {
            this->clear_rows(), entering.clear();
            for (const long index : drafting) first ? add_missing(index, head.texts[index].missing) : add_last(index, targets[index]);
            drafting = step(targets);
        }
    }

  private:
    static constexpr long TOGETHER = 16;  // most rows of a text in a forward

    const DraftHead& head;
    std::vector<ChainSequence> sequences;  // the same as the target's, of the head's caches
    std::vector<std::vector<T>> after;     // by sequence, the normed state of its last row
    std::vector<T> entering;               // states of the coming rows
    std::vector<long> last;                // the last of the coming rows of each part

    static Chain with_count(Chain chain, long count) {
        chain.count = count;
        return chain;
    }
    // Begins a draft; where many rows are missing it makes the first ones.
    void begin(long index, const ChainSequence& target) {
        HeadText& text = head.texts[index];
        ChainSequence& s = sequences[index];
        s = {};
        s.caches = text.caches, s.capacity = text.capacity, s.start = text.start, s.drawing = target.drawing;
        s.drawing.position += target.drafted - text.missing + 1;  // the last of these rows draws what the target draws next
        while (text.missing > TOGETHER) {
            this->clear_rows(), entering.clear();
            add_missing(index, TOGETHER);
            this->advance(last_rows());
            T* states = static_cast<T*>(text.states);
            std::copy(states + TOGETHER * hidden, states + (TOGETHER + text.missing) * hidden, states);
            std::copy(text.tokens + TOGETHER, text.tokens + TOGETHER + text.missing, text.tokens);
        }
    }
    // The first of the missing rows of a text, which are then in its cache.
    void add_missing(long index, long count) {
        HeadText& text = head.texts[index];
        const T* states = static_cast<const T*>(text.states);
        this->add_part(index, text.start, text.tokens, text.tokens + 1, count - 1);
        entering.insert(entering.end(), states, states + count * hidden);
        text.start += count, text.missing -= count;
    }
    // The row of the token that was drafted last.
    void add_last(long index, const ChainSequence& target) {
        const long drafted = target.guess_count;
        this->add_part(index, head.texts[index].start + drafted - 1, target.guesses + drafted - 1, nullptr, 0);
        entering.insert(entering.end(), after[index].begin(), after[index].end());
    }
    // Drafts a token of each part by its last row; returns the sequences that go on.
    std::vector<long> step(ChainSequence* targets) {
        const Head own = last_rows();
        this->paths.clear();
        for (size_t part = 0; part < parts.size(); part++)
            if (Drawing& drawing = this->drawings[part]; drawing.changes) {
                const ChainSequence& target = targets[of_part[part]];
                this->paths.push_back(this->path_of(target, target.drafted, target.guesses, target.guess_count));
                this->set_path(drawing, this->paths.back(), this->paths.back().size());
            }
        this->advance(own);
        std::vector<long> left;
        for (size_t part = 0; part < parts.size(); part++) {
            const long index = of_part[part];
            ChainSequence& target = targets[index];
            target.guesses[target.guess_count++] = tokens[part];
            const bool ends = chain.follow(index, tokens[part], this->confidences[part]);
            if (ends || target.guess_count == head.texts[index].limit) continue;
            after[index].resize(hidden);
            normalize<T>(this->f.head->norm, stream.data() + last[part] * hidden, after[index].data(), hidden);
            left.push_back(index);
        }
        return left;
    }
    // The head with outputs for the last row of each part, which draws a token.
    Head last_rows() {
        Head own = this->prepare_head(parts.size());
        last.clear();
        for (size_t part = 0; part < parts.size(); part++) {
            last.push_back(parts[part].first_row + parts[part].rows - 1);
            this->drawings[part] = this->drawings[last[part]];
        }
        own.rows = last.data(), own.count = last.size();
        return own;
    }
    void embed(long rows) override {
        Links<T>::embed(rows);
        join_rows<T>(head.entry, stream.data(), entering.data(), this->joined, rows);
    }
};

// A chain of the target whose guesses a head drafts.
template <class T> class HeadRun : public Links<T> {
  public:
    explicit HeadRun(const Chain& chain) : Links<T>(chain), head(*chain.head), drafts(head, chain.count) {}

  private:
    DraftHead& head;
    HeadLinks<T> drafts;

    void guess() override {
        const auto start = std::chrono::steady_clock::now();
        drafts.draft_for(this->chain.sequences, this->running);
        head.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
    // The head is given the state of each row that is taken, with the token after it. Nothing follows what is not a number.
    bool take_row(long index, long row) override {
        HeadText& text = head.texts[index];
        if (!text.caches || !this->finite[row]) return !text.caches;
        const long hidden = this->hidden;
        normalize<T>(this->f.head->norm, this->stream.data() + row * hidden, static_cast<T*>(text.states) + text.missing * hidden, hidden);
        text.tokens[text.missing++] = this->tokens[row];
        return true;
    }
};

}  // namespace
