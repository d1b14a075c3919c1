// The rules and terms are those of infinilm/sampling; infinilm/kernels/sampling.py does the same on a GPU.
//
// A token's exact score takes two logarithms, which is too slow for every token. But a number's bits, read as an
// integer, bound its -log2 from above, and an exponential variate -log(1 - v) is at least v. So an upper bound of
// scores is cheap, and each block of the vocabulary gets one. The block with the greatest bound is computed exactly.
// Another block can only win if its bound reaches the best score found, so usually one block suffices.
#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "dispatch.h"
#include "threads.h"

namespace infinilm {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kBlock = 256;  // tokens
constexpr double kLog2E = 1.4426950408889634;
constexpr float kHashScale = 0x1.fffffep-33f;  // the greatest below 2^-32, so that no hash becomes 1, because of log(0)
// The offset of bounds: the exponent bias of floats, and 32 because hashes are in units of 2^-32.
constexpr float kBoundOffset = 127.0f + 32.0f;
// Bounds and scores are rounded a few times, each time by 2^-24 of their terms.
constexpr float kRounding = 0x1p-20f;
constexpr float kLargestTerm = 512.0f;
// Tokens whose logit is this many temperatures below the greatest have no weight, and no noise can make them win.
constexpr float kReach = 40.0f;

uint32_t mix(uint32_t value, uint32_t upper, uint32_t lower) {
    value = ((value ^ upper) * 0x85ebca6bu) ^ lower;
    value = (value ^ (value >> 13)) * 0xc2b2ae35u;
    return value ^ (value >> 16);
}

uint64_t draw_key(uint64_t seed, int64_t position) {
    uint64_t key = seed + (uint64_t(position) + 1) * 0x9e3779b97f4a7c15u;
    key = (key ^ (key >> 30)) * 0xbf58476d1ce4e5b9u;
    key = (key ^ (key >> 27)) * 0x94d049bb133111ebu;
    return key ^ (key >> 31);
}

// The logarithm of the exponential variate of a hash, with correctly rounded logarithms.
float log_exponential(uint32_t hash) {
    const double uniform = (float(hash) + 0.5f) * kHashScale;
    // 1 - v would lose the last digits of a small v. Two terms of the series are exact enough for small v.
    const double variate = uniform < 0x1p-20 ? uniform + 0.5 * uniform * uniform : -std::log(1.0 - uniform);
    return float(std::log(double(float(variate))));
}

// Draws the token of one row.
class Draw {
public:
    Draw(const float* logits, int64_t vocab_size, const DrawSettings& settings, int64_t position)
        : logits_(logits), vocab_size_(vocab_size), settings_(settings), temperature_(float(settings.temperature)) {
        const uint64_t key = draw_key(settings.seed, position);
        contest_.is_greedy = settings.temperature == 0;
        contest_.upper = uint32_t(key >> 32);
        contest_.lower = uint32_t(key);
        contest_.rate = contest_.is_greedy ? 0.0f : float(kLog2E) / temperature_;
        contest_.cutoff = -kInfinity;
        maxima_.resize((vocab_size + kBlock - 1) / kBlock);
        bounds_.resize(maxima_.size());
    }

    int64_t token() {
        for (size_t block = 0; block < maxima_.size(); ++block) scan(block);
        row_max_ = *std::max_element(maxima_.begin(), maxima_.end());
        if (!(std::abs(row_max_) < kInfinity)) return -1;
        if (contest_.is_greedy) return first_greatest();
        if (settings_.top_k < vocab_size_ || settings_.top_p < 1 || settings_.log_min_p > -kInfinity) {
            contest_.cutoff = find_cutoff();
            for (size_t block = 0; block < maxima_.size(); ++block) {
                maxima_[block] >= contest_.cutoff ? scan(block) : void(bounds_[block] = -kInfinity);
            }
        }
        return winner();
    }

private:
    const float* begin_of(size_t block) const { return logits_ + block * kBlock; }
    const float* end_of(size_t block) const { return logits_ + std::min<int64_t>((block + 1) * kBlock, vocab_size_); }

    void scan(size_t block) {
        const int count = int(end_of(block) - begin_of(block));
        kernels().scan(begin_of(block), count, uint32_t(block * kBlock), contest_, &maxima_[block], &bounds_[block]);
    }

    int64_t first_greatest() const {
        const size_t block = std::find(maxima_.begin(), maxima_.end(), row_max_) - maxima_.begin();
        return std::find(begin_of(block), end_of(block), row_max_) - logits_;
    }

    // Collect all logits of at least `low` in leaders_.
    void gather(float low) {
        leaders_.clear();
        for (size_t block = 0; block < maxima_.size(); ++block) {
            if (maxima_[block] < low) continue;
            std::copy_if(begin_of(block), end_of(block), std::back_inserter(leaders_), [=](float x) { return x >= low; });
        }
    }

    // Gather more and more logits, but none below the cutoff, until there are enough.
    template <typename IsEnough>
    void gather_until(float cutoff, const IsEnough& is_enough) {
        for (float reach = 2.0f;; reach *= 2) {
            const float low = std::max(cutoff, row_max_ - reach * temperature_);
            gather(low);
            if (low == cutoff || is_enough()) return;
        }
    }

    int64_t weigh(const float* from, size_t count, int64_t* weights) const {
        kernels().weigh(from, int(count), row_max_, temperature_, weights);
        int64_t total = 0;
        for (size_t i = 0; i < count; ++i) total += weights[i];
        return total;
    }

    int64_t weigh_leaders() {
        weights_.resize(leaders_.size());
        return weigh(leaders_.data(), leaders_.size(), weights_.data());
    }

    int64_t weigh_all() const {
        int64_t weights[kBlock], total = 0;
        for (size_t block = 0; block < maxima_.size(); ++block) {
            if (maxima_[block] < row_max_ - kReach * temperature_) continue;
            total += weigh(begin_of(block), end_of(block) - begin_of(block), weights);
        }
        return total;
    }

    // Tokens with a smaller logit are not drawn.
    float find_cutoff() {
        float cutoff = row_max_ - kReach * temperature_;
        const bool has_top_k = settings_.top_k < vocab_size_;
        if (has_top_k) {
            const size_t count = size_t(settings_.top_k);
            gather_until(cutoff, [&] { return leaders_.size() >= count; });
            if (leaders_.size() >= count) {
                std::nth_element(leaders_.begin(), leaders_.begin() + (count - 1), leaders_.end(), std::greater<>());
                cutoff = std::max(cutoff, leaders_[count - 1]);
            }
        }
        if (settings_.top_p < 1) {
            if (has_top_k) gather(cutoff);
            const int64_t total = has_top_k ? weigh_leaders() : weigh_all();
            const int64_t goal = int64_t(std::ceil(double(total) * settings_.top_p));
            gather_until(cutoff, [&] { return weigh_leaders() >= goal; });
            std::sort(leaders_.begin(), leaders_.end(), std::greater<>());
            weigh_leaders();
            int64_t reached = 0;
            size_t last = 0;
            while ((reached += weights_[last]) < goal && last + 1 < leaders_.size()) ++last;
            cutoff = std::max(cutoff, leaders_[last]);
        }
        return std::max(cutoff, row_max_ + temperature_ * float(settings_.log_min_p));
    }

    int64_t winner() {
        const float origin = row_max_ * contest_.rate;
        int64_t token = -1;
        float best = -kInfinity, threshold = -kInfinity;
        const auto consider = [&](size_t block) {
            for (const float* x = begin_of(block); x < end_of(block); ++x) {
                const uint32_t hash = mix(mix(uint32_t(x - logits_), 0, 0), contest_.upper, contest_.lower);
                if (*x < contest_.cutoff || bound_of(*x, hash) < threshold) continue;
                const float score = (*x - row_max_) / temperature_ - log_exponential(hash);
                if (score > best || (score == best && x - logits_ < token)) {
                    best = score;
                    token = x - logits_;
                    // A block with a token of this score or a greater one has at least this bound. If logits divided by
                    // the temperature overflow, it is NaN, and no bound is below it.
                    threshold = best * float(kLog2E) + origin - kBoundOffset -
                                kRounding * (std::abs(origin) + kLargestTerm);
                }
            }
        };
        const size_t first = std::max_element(bounds_.begin(), bounds_.end()) - bounds_.begin();
        consider(first);
        for (size_t block = 0; block < bounds_.size(); ++block) {
            if (block != first && !(bounds_[block] < threshold)) consider(block);
        }
        return token;
    }

    float bound_of(float logit, uint32_t hash) const {
        const float noise = float(hash);
        int32_t bits;
        std::memcpy(&bits, &noise, sizeof bits);
        return logit * contest_.rate - float(bits) * kUlp;
    }

    const float* logits_;
    const int64_t vocab_size_;
    const DrawSettings& settings_;
    const float temperature_;
    float row_max_ = 0;
    Contest contest_;
    std::vector<float> maxima_, bounds_;  // per block
    std::vector<float> leaders_;
    std::vector<int64_t> weights_;
};

}  // namespace

int64_t draw(const float* logits, int64_t vocab_size, const DrawSettings& settings, int64_t position) {
    return Draw(logits, vocab_size, settings, position).token();
}

void draw_rows(const float* logits, int64_t count, int64_t vocab_size, const int64_t* settings, const int64_t* rows,
               const int64_t* positions, int64_t* tokens, bool* are_finite) {
    static_assert(sizeof(DrawSettings) == 5 * sizeof(int64_t));
    parallel_for(count, 1, [&](int64_t i) {
        DrawSettings own;
        std::memcpy(&own, settings + 5 * rows[i], sizeof own);
        const int64_t token = draw(logits + i * vocab_size, vocab_size, own, positions[i]);
        tokens[i] = std::max<int64_t>(token, 0);
        are_finite[i] = token >= 0;
    });
}

}  // namespace infinilm
