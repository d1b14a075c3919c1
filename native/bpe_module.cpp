// The part of the Python module that converts text to tokens.
#include "bpe_module.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "bpe.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace infinilm {
namespace {

constexpr size_t kLongWord = 4096;  // bytes from which on the GIL is released

template <typename T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::string_view view(nb::handle text) {
    Py_ssize_t size;
    const char* bytes = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
    if (bytes == nullptr) throw nb::python_error();
    return {bytes, size_t(size)};
}

nb::str make_str(std::string_view text) { return nb::str(text.data(), text.size()); }

template <typename T>
std::vector<T> copy(const std::optional<Array<const T>>& array) {
    return array ? std::vector<T>(array->data(), array->data() + array->size()) : std::vector<T>();
}

std::shared_ptr<BPE> make_bpe(std::shared_ptr<const Strings> tokens, const Strings* merges,
                              std::optional<Array<const double>> scores, std::optional<Array<const uint8_t>> can_result,
                              bool ignores_merges, bool has_byte_fallback, std::optional<uint32_t> unknown) {
    const BPE::Settings settings = {ignores_merges, has_byte_fallback, unknown};
    nb::gil_scoped_release release;
    return std::make_shared<BPE>(std::move(tokens), merges, copy(scores), copy(can_result), settings);
}

std::vector<uint32_t> encode(const BPE& bpe, const nb::list& words) {
    std::vector<uint32_t> ids;
    for (nb::handle word : words) {
        const std::string_view text = view(word);
        if (text.size() < kLongWord) {
            bpe.encode(text, ids);
        } else {
            nb::gil_scoped_release release;
            bpe.encode(text, ids);
        }
    }
    return ids;
}

nb::list split(const BPE& bpe, nb::str text, bool with_control) {
    nb::list found;
    for (const auto& [part, id] : bpe.split(view(text), with_control)) {
        if (id) {
            found.append(*id);
        } else {
            found.append(make_str(part));
        }
    }
    return found;
}

nb::object content(const BPE& bpe, size_t id) {
    if (id >= bpe.tokens().size() || bpe.find(bpe.tokens()[id]) != uint32_t(id)) return nb::none();
    return make_str(bpe.tokens()[id]);
}

}  // namespace

void bind_bpe(nb::module_& module) {
    nb::class_<Strings>(module, "Strings")
        .def(
            "__init__",
            [](Strings* self, Array<const uint8_t> data, size_t position, size_t count, size_t end) {
                if (position > end || end > data.size()) throw std::invalid_argument("end lies behind the data");
                nb::gil_scoped_release release;
                new (self) Strings(data.data(), position, count, end);
            },
            "data"_a.noconvert(), "position"_a, "count"_a, "end"_a)
        .def_static(
            "of",
            [](const nb::list& texts) {
                std::vector<std::string_view> views;
                for (nb::handle text : texts) views.push_back(view(text));
                return std::make_shared<Strings>(views);
            },
            "texts"_a)
        .def("__len__", &Strings::size)
        .def("__getitem__",
             [](const Strings& self, size_t index) {
                 if (index >= self.size()) throw nb::index_error();
                 return make_str(self[index]);
             })
        .def_prop_ro("stored_bytes", &Strings::stored_bytes)
        .def_prop_ro("longest", &Strings::longest);

    nb::class_<BPE>(module, "BPE")
        .def(nb::new_(&make_bpe), "tokens"_a, nb::kw_only(), "merges"_a.none(), "scores"_a.noconvert().none(),
             "can_result"_a.noconvert().none(), "ignores_merges"_a, "has_byte_fallback"_a, "unknown"_a.none())
        .def("find", [](const BPE& self, nb::str text) { return self.find(view(text)); }, "text"_a)
        .def("content", &content, "id"_a)
        .def("encode", &encode, "words"_a)
        .def("add_tokens", &BPE::add_tokens, "ids"_a, "control_ids"_a)
        .def("split", &split, "text"_a, "with_control"_a);
}

}  // namespace infinilm
