// Byte pair encoding with the vocabulary of a GGUF file. Texts are normalised and divided into words elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace infinilm {

// Many short texts in UTF-8, stored one after the other.
class Strings {
public:
    // An array of a GGUF header, from `position` on: each text follows its length. Throws if a text is not UTF-8 or
    // ends after `end`.
    Strings(const uint8_t* data, size_t position, size_t count, size_t end);
    explicit Strings(const std::vector<std::string_view>& texts);

    size_t size() const { return ends_.size() - 1; }
    std::string_view operator[](size_t index) const {
        return std::string_view(bytes_).substr(ends_[index], ends_[index + 1] - ends_[index]);
    }
    // The size of the array in a GGUF header, in bytes.
    size_t stored_bytes() const { return bytes_.size() + 8 * size(); }
    size_t longest() const;  // in characters

private:
    std::string bytes_;
    std::vector<uint32_t> ends_;  // ends_[0] is 0
};

// A part that `BPE::split` returns: text, or a token that was added to the vocabulary.
using Part = std::pair<std::string_view, std::optional<uint32_t>>;

class BPE {
public:
    struct Settings {
        bool ignores_merges;     // a word that is a token stays whole, even if merges would divide it
        bool has_byte_fallback;  // characters without a token become the tokens of their bytes
        std::optional<uint32_t> unknown;
    };

    // Merges are "left right", best first. Without merges, any two tokens are merged if together they are a token for
    // which `can_result` is true. The highest score goes first, then the longer left part, then the longer right part.
    BPE(std::shared_ptr<const Strings> tokens, const Strings* merges, std::vector<double> scores,
        std::vector<uint8_t> can_result, const Settings& settings);

    // The id of the token with that text, if there is one; the last one if there are several.
    std::optional<uint32_t> find(std::string_view text) const;
    const Strings& tokens() const { return *tokens_; }

    // Append the tokens of a word to `ids`.
    void encode(std::string_view word, std::vector<uint32_t>& ids) const;

    // Add tokens that `split` finds in texts. Control tokens are found only if asked for.
    void add_tokens(const std::vector<uint32_t>& ids, const std::vector<uint32_t>& control_ids);
    // Find added tokens from the left, the longest first.
    std::vector<Part> split(std::string_view text, bool with_control) const;

private:
    struct Merge;
    struct Pair {
        uint32_t left, right, rank, result;
    };

    bool find_merge(uint32_t left, uint32_t right, Merge& merge, std::string& joined) const;
    void index_merges(const Strings& merges);
    size_t slot_of(std::string_view text) const;
    size_t slot_of(uint32_t left, uint32_t right) const;

    std::shared_ptr<const Strings> tokens_;
    std::vector<uint32_t> slots_;  // 1 + a token's id, or 0
    std::vector<Pair> pairs_;      // a hash table like slots_; `result` is kNone in empty slots
    std::vector<double> scores_;
    std::vector<uint8_t> can_result_;
    Settings settings_;
    std::vector<std::optional<uint32_t>> byte_tokens_;
    std::vector<uint8_t> added_;                // by id: 1 added, 2 control token
    std::vector<std::vector<uint32_t>> sizes_;  // by first byte: sizes of added tokens, the largest first
};

}  // namespace infinilm
