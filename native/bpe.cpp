#include "bpe.h"

#include <algorithm>
#include <cstring>
#include <queue>
#include <stdexcept>
#include <tuple>

namespace infinilm {
namespace {

constexpr uint32_t kNone = UINT32_MAX;
constexpr char kDigits[] = "0123456789ABCDEF";

bool is_continuation(uint8_t byte) { return (byte & 0xc0) == 0x80; }

size_t count_characters(std::string_view text) {
    size_t count = 0;
    for (const char byte : text) count += !is_continuation(uint8_t(byte));
    return count;
}

size_t character_size(uint8_t first) { return first < 0x80 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4; }

// The same rules as Python's decoder: no surrogates, nothing beyond U+10FFFF, no overlong forms.
bool is_utf8(std::string_view text) {
    for (size_t i = 0; i < text.size();) {
        const auto first = uint8_t(text[i]);
        if (first < 0x80) {
            ++i;
            continue;
        }
        const size_t size = character_size(first);
        if (first < 0xc2 || first > 0xf4 || text.size() - i < size) return false;
        for (size_t k = 1; k < size; ++k) {
            if (!is_continuation(uint8_t(text[i + k]))) return false;
        }
        const auto second = uint8_t(text[i + 1]);
        if ((first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f) || (first == 0xf0 && second < 0x90) ||
            (first == 0xf4 && second > 0x8f)) {
            return false;
        }
        i += size;
    }
    return true;
}

uint64_t mix(uint64_t value) {
    value *= 0x9e3779b97f4a7c15;
    return value ^ value >> 32;
}

uint64_t hash(std::string_view text) {
    uint64_t found = text.size();
    while (text.size() > 8) {
        uint64_t eight;
        std::memcpy(&eight, text.data(), 8);
        found = mix(found ^ eight);
        text.remove_prefix(8);
    }
    uint64_t rest = 0;
    std::memcpy(&rest, text.data(), text.size());
    return mix(mix(found ^ rest));
}

// A power of two, so that at most half of the table is filled.
size_t table_size(size_t count) {
    size_t size = 16;
    while (size < 2 * count) size *= 2;
    return size;
}

}  // namespace

Strings::Strings(const uint8_t* data, size_t position, size_t count, size_t end) {
    ends_.reserve(count + 1);
    ends_.push_back(0);
    size_t num_bytes = 0;
    for (size_t at = position; ends_.size() <= count;) {
        uint64_t size;
        if (end - at < sizeof size) throw std::invalid_argument("the array ends too early");
        std::memcpy(&size, data + at, sizeof size);
        at += sizeof size;
        if (end - at < size) throw std::invalid_argument("a text ends too late");
        at += size;
        num_bytes += size;
        ends_.push_back(uint32_t(num_bytes));
    }
    if (num_bytes >= kNone) throw std::invalid_argument("there is too much text");
    bytes_.reserve(num_bytes);
    for (size_t index = 0; index < count; ++index) {
        position += 8;
        bytes_.append(reinterpret_cast<const char*>(data) + position, ends_[index + 1] - ends_[index]);
        position += ends_[index + 1] - ends_[index];
        if (!is_utf8((*this)[index])) throw std::invalid_argument("a text is not UTF-8");
    }
}

Strings::Strings(const std::vector<std::string_view>& texts) {
    ends_.push_back(0);
    for (const std::string_view text : texts) {
        bytes_.append(text);
        if (bytes_.size() >= kNone) throw std::invalid_argument("there is too much text");
        ends_.push_back(uint32_t(bytes_.size()));
    }
}

size_t Strings::longest() const {
    size_t longest = 0;
    for (size_t i = 0; i < size(); ++i) longest = std::max(longest, count_characters((*this)[i]));
    return longest;
}

// A possible merge. The queue's greatest is merged first.
struct BPE::Merge {
    double rank;
    int left, right;
    uint32_t result, place;

    bool operator<(const Merge& other) const {
        return std::tie(other.rank, left, right, other.result, other.place) <
               std::tie(rank, other.left, other.right, result, place);
    }
};

BPE::BPE(std::shared_ptr<const Strings> tokens, const Strings* merges, std::vector<double> scores,
         std::vector<uint8_t> can_result, const Settings& settings)
    : tokens_(std::move(tokens)),
      slots_(table_size(tokens_->size())),
      scores_(std::move(scores)),
      can_result_(std::move(can_result)),
      settings_(settings),
      added_(tokens_->size()),
      sizes_(256) {
    const size_t count = tokens_->size();
    if (merges == nullptr && (scores_.size() != count || can_result_.size() != count)) {
        throw std::invalid_argument("scores and can_result must have an item for each token");
    }
    if (settings_.unknown && *settings_.unknown >= count) throw std::invalid_argument("unknown is not a token's id");
    for (size_t id = 0; id < count; ++id) slots_[slot_of((*tokens_)[id])] = uint32_t(id) + 1;
    if (settings_.has_byte_fallback) {
        for (int byte = 0; byte < 256; ++byte) {
            const std::string text = {'<', '0', 'x', kDigits[byte >> 4], kDigits[byte & 15], '>'};
            byte_tokens_.push_back(find(text));
        }
    }
    if (merges != nullptr) index_merges(*merges);
}

// The slot of a text, or the free slot where it belongs.
size_t BPE::slot_of(std::string_view text) const {
    size_t slot = hash(text) & (slots_.size() - 1);
    while (slots_[slot] != 0 && (*tokens_)[slots_[slot] - 1] != text) slot = (slot + 1) & (slots_.size() - 1);
    return slot;
}

size_t BPE::slot_of(uint32_t left, uint32_t right) const {
    size_t slot = mix(mix(uint64_t(left) << 32 | right)) & (pairs_.size() - 1);
    while (pairs_[slot].result != kNone && (pairs_[slot].left != left || pairs_[slot].right != right)) {
        slot = (slot + 1) & (pairs_.size() - 1);
    }
    return slot;
}

std::optional<uint32_t> BPE::find(std::string_view text) const {
    const uint32_t found = slots_[slot_of(text)];
    return found == 0 ? std::nullopt : std::optional(found - 1);
}

void BPE::index_merges(const Strings& merges) {
    pairs_.assign(table_size(merges.size()), {0, 0, 0, kNone});
    std::string joined;
    for (size_t rank = 0; rank < merges.size(); ++rank) {
        const std::string_view merge = merges[rank];
        const size_t space = merge.find(' ');
        if (space == 0 || space >= merge.size() - 1) throw std::invalid_argument("a merge is not two tokens and a space");
        const std::string_view texts[] = {merge.substr(0, space), merge.substr(space + 1)};
        joined.assign(texts[0]).append(texts[1]);
        const auto left = find(texts[0]), right = find(texts[1]), result = find(joined);
        if (!left || !right || !result) throw std::invalid_argument("a merge has texts that are no tokens");
        pairs_[slot_of(*left, *right)] = {*left, *right, uint32_t(rank), *result};
    }
}

bool BPE::find_merge(uint32_t left, uint32_t right, Merge& merge, std::string& joined) const {
    if (!pairs_.empty()) {
        const Pair& pair = pairs_[slot_of(left, right)];
        merge.rank = pair.rank;
        merge.result = pair.result;
        merge.left = merge.right = 0;
        return pair.result != kNone;
    }
    const std::string_view texts[] = {(*tokens_)[left], (*tokens_)[right]};
    joined.assign(texts[0]).append(texts[1]);
    const auto result = find(joined);
    if (!result || !can_result_[*result]) return false;
    merge.rank = -scores_[*result];
    merge.result = *result;
    merge.left = int(count_characters(texts[0]));
    merge.right = int(count_characters(texts[1]));
    return true;
}

void BPE::encode(std::string_view word, std::vector<uint32_t>& ids) const {
    if (word.empty()) return;
    if (settings_.ignores_merges) {
        if (const auto whole = find(word)) {
            ids.push_back(*whole);
            return;
        }
    }
    // Adjacent unknown characters become one token, which is added before the next known character. Byte tokens do not
    // end such a run.
    struct Symbol {
        uint32_t id;
        int64_t before, after;  // places of the neighbours
        bool is_there;
    };
    std::vector<Symbol> symbols;
    const auto add = [&](uint32_t id) {
        const auto place = int64_t(symbols.size());
        symbols.push_back({id, place - 1, place + 1, true});
    };
    bool is_unknown = false;
    for (size_t i = 0, size; i < word.size(); i += size) {
        size = character_size(uint8_t(word[i]));
        const std::string_view character = word.substr(i, size);
        if (const auto id = find(character)) {
            if (is_unknown) add(*settings_.unknown);
            is_unknown = false;
            add(*id);
            continue;
        }
        if (settings_.has_byte_fallback && std::all_of(character.begin(), character.end(), [&](char byte) {
                return byte_tokens_[uint8_t(byte)].has_value();
            })) {
            for (const char byte : character) add(*byte_tokens_[uint8_t(byte)]);
            continue;
        }
        is_unknown = is_unknown || settings_.unknown.has_value();
    }
    if (is_unknown) add(*settings_.unknown);

    const auto count = int64_t(symbols.size());
    std::priority_queue<Merge> queue;
    std::string joined;
    Merge merge;
    const auto try_at = [&](int64_t place) {
        const int64_t after = place < 0 ? count : symbols[place].after;
        if (after >= count || !find_merge(symbols[place].id, symbols[after].id, merge, joined)) return;
        merge.place = uint32_t(place);
        queue.push(merge);
    };
    for (int64_t place = 0; place + 1 < count; ++place) try_at(place);
    while (!queue.empty()) {
        const Merge top = queue.top();
        queue.pop();
        Symbol& left = symbols[top.place];
        if (!left.is_there || left.after >= count) continue;
        Symbol& right = symbols[left.after];
        // The pair at this place may have changed since. Another pair with the same result is merged as well.
        if (!find_merge(left.id, right.id, merge, joined) || merge.result != top.result) continue;
        left.id = top.result;
        left.after = right.after;
        right.is_there = false;
        if (left.after < count) symbols[left.after].before = top.place;
        try_at(left.before);
        try_at(top.place);
    }
    for (const Symbol& symbol : symbols) {
        if (symbol.is_there) ids.push_back(symbol.id);
    }
}

void BPE::add_tokens(const std::vector<uint32_t>& ids, const std::vector<uint32_t>& control_ids) {
    for (const uint32_t id : ids) {
        if (id >= added_.size()) throw std::invalid_argument("an added token has no text");
        const std::string_view text = (*tokens_)[id];
        if (text.empty()) continue;
        added_[id] = 1;
        auto& sizes = sizes_[uint8_t(text[0])];
        const auto place = std::lower_bound(sizes.begin(), sizes.end(), uint32_t(text.size()), std::greater<>());
        if (place == sizes.end() || *place != text.size()) sizes.insert(place, uint32_t(text.size()));
    }
    for (const uint32_t id : control_ids) {
        if (id < added_.size() && added_[id]) added_[id] = 2;
    }
}

std::vector<Part> BPE::split(std::string_view text, bool with_control) const {
    std::vector<Part> parts;
    size_t begin = 0;
    for (size_t i = 0; i < text.size();) {
        std::optional<uint32_t> found;
        for (const uint32_t size : sizes_[uint8_t(text[i])]) {
            if (size > text.size() - i) continue;
            const auto id = find(text.substr(i, size));
            if (!id || added_[*id] == 0 || (added_[*id] == 2 && !with_control)) continue;
            if (i > begin) parts.push_back({text.substr(begin, i - begin), std::nullopt});
            parts.push_back({text.substr(i, size), id});
            begin = i += size;
            found = id;
            break;
        }
        if (!found) ++i;
    }
    if (begin < text.size()) parts.push_back({text.substr(begin), std::nullopt});
    return parts;
}

}  // namespace infinilm
