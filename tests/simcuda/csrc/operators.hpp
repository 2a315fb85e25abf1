// Every operator on CUDA tensors: the host's kernel runs at once, on tensors of the host that have the
// same memory, and the simulation is told what was read and written on the current stream.
#pragma once

#include <torch/library.h>

#include "generators.hpp"
#include "guard.hpp"

namespace simulated {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

inline bool starts_with_any(const std::string& text, std::initializer_list<const char*> prefixes) {
  return std::any_of(prefixes.begin(), prefixes.end(),
      [&](const char* prefix) { return text.rfind(prefix, 0) == 0; });
}

// A tensor's bytes in its storage, the gaps of a strided one included.
inline Span span_of(const Tensor& tensor) {
  if (tensor.numel() == 0) return {0, 0};
  int64_t last = 0;
  for (int64_t k = 0; k < tensor.dim(); k++) last += (tensor.size(k) - 1) * tensor.stride(k);
  int64_t item = tensor.element_size(), begin = tensor.storage_offset() * item;
  return {begin, begin + (last + 1) * item};
}

// Under the lock.
inline void note(const Tensor& tensor, int stream, bool writes, const std::string& by) {
  simulation().memory.use(tensor.storage().data(), span_of(tensor), stream, writes, by);
}

inline void set_geometry(const Tensor& tensor, const Tensor& like) {
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
      like.sizes(), like.strides(), like.storage_offset());
}

inline Tensor host_tensor(c10::Storage storage, const Tensor& like) {
  auto key = c10::DispatchKeySet(c10::DispatchKey::CPU);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), key, like.dtype());
  set_geometry(made, like);
  return made;
}

// One call of one operator.
class Call {
 public:
  explicit Call(const c10::OperatorHandle& op) : op_(op), name_(op.schema().name()) {}

  void run(Stack* stack) {
    size_t count = op_.schema().arguments().size();
    Stack host = arguments_on_host(Stack(stack->end() - count, stack->end()));
    if (device_ < 0) device_ = current_device;
    c10::DeviceGuard on(c10::Device(CUDA, device_));
    run_on_host(host);
    adopt_what_was_resized();
    Stack results;
    for (const auto& value : host) results.push_back(result_on_device(value));
    tell_the_simulation();
    stack->erase(stack->end() - count, stack->end());
    for (auto& value : results) stack->push_back(std::move(value));
  }

 private:
  struct Given {
    Tensor device, host;
    bool written;
  };
  struct Twins {  // storages with the same memory
    c10::Storage device, host;
    const void* address;
  };

  // Arguments, from the device to the host.

  Stack arguments_on_host(const Stack& given) {
    Stack host(given.size());
    auto is_tensors = [](const IValue& value) {
      return value.isTensor() || value.isTensorList() || value.isOptionalTensorList();
    };
    for (bool tensors : {true, false})  // tensors first: they tell the device
      for (size_t k = 0; k < given.size(); k++)
        if (is_tensors(given[k]) == tensors) {
          auto* alias = op_.schema().arguments()[k].alias_info();
          host[k] = argument_on_host(given[k], alias && alias->isWrite());
        }
    return host;
  }

  IValue argument_on_host(const IValue& value, bool written) {
    if (value.isTensor()) return tensor_on_host(value.toTensor(), written);
    if (value.isTensorList()) {
      c10::List<Tensor> out;
      for (const Tensor& each : value.toTensorList()) out.push_back(tensor_on_host(each, written));
      return out;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> out;
      for (const std::optional<Tensor>& each : value.toOptionalTensorList())
        out.push_back(each ? std::optional<Tensor>(tensor_on_host(*each, written)) : each);
      return out;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) {
      if (device_ < 0) device_ = index_of(value.toDevice());
      return c10::Device(c10::kCPU);
    }
    if (value.isGenerator() && value.toGenerator().defined())
      return generator_on_host(value.toGenerator());
    return value;
  }

  Tensor tensor_on_host(const Tensor& tensor, bool written) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().is_cpu()) {
      bool scalar = tensor.dim() == 0;
      bool may_mix = starts_with_any(name_,
          {"aten::index", "aten::_index_put", "aten::_pack_padded", "aten::_pad_packed"});
      if (!scalar && !may_mix) refuse_second_device(tensor.device());
      return tensor;
    }
    TORCH_CHECK(tensor.is_cuda(), name_, ": not a tensor of a CUDA device: ", tensor.device());
    if (device_ < 0) device_ = tensor.device().index();
    if (device_ != tensor.device().index()) refuse_second_device(tensor.device());
    for (auto& each : given_)
      if (each.device.is_same(tensor)) {
        each.written |= written;
        return each.host;
      }
    given_.push_back({tensor, host_tensor(twin_of(tensor.storage()), tensor), written});
    return given_.back().host;
  }

  c10::Storage twin_of(const c10::Storage& storage) {
    for (const auto& each : twins_)
      if (each.device.is_alias_of(storage)) return each.host;
    void* address = const_cast<void*>(storage.data());
    c10::DataPtr borrowed(address, c10::Device(c10::kCPU));
    c10::Storage host(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(borrowed),
        at::getCPUAllocator(), true);
    twins_.push_back({storage, host, address});
    return host;
  }

  at::Generator generator_on_host(const at::Generator& generator) const {
    auto device = generator.device();
    TORCH_CHECK(device.is_cuda(), "Expected a 'cuda' device type for generator but found '", device, "'");
    TORCH_CHECK(device_ < 0 || device.index() == device_, "Expected a 'cuda:", device_,
        "' generator device but found '", device, "'");
    return Generator::inside(generator);
  }

  [[noreturn]] void refuse_second_device(c10::Device other) const {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two "
        "devices, cuda:", device_ < 0 ? "?" : std::to_string(device_), " and ", other, "! (in ",
        name_, ")");
  }

  // The operator itself.

  void run_on_host(Stack& host) {
    bool draws = op_.hasTag(at::Tag::nondeterministic_seeded);
    bool takes_generator = give_generator(host);
    if (name_ == "aten::native_dropout") {
      drop(host);
    } else if (draws && !takes_generator) {
      run_with_lent_generator(host);
    } else {
      redispatch(host);
    }
  }

  void redispatch(Stack& host) {
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &host);
  }

  at::Generator& own_generator() const { return Generator::inside(default_generator(device_)); }

  // Gives the device's generator where none was given; returns whether the operator takes one.
  bool give_generator(Stack& host) {
    bool takes = false;
    for (size_t k = 0; k < host.size(); k++) {
      if (op_.schema().arguments()[k].name() != "generator") continue;
      takes = true;
      bool given = host[k].isGenerator() && host[k].toGenerator().defined();
      if (!given) host[k] = own_generator();
    }
    return takes;
  }

  // It takes no generator, and must not touch the host's, from which another thread may draw just now.
  void drop(Stack& host) {
    Tensor x = host[0].toTensor();
    double p = host[1].toDouble();
    bool training = host[2].isNone() || host[2].toBool();
    Tensor mask = at::ones(x.sizes(), x.options().dtype(at::kBool)), dropped = x.clone();
    if (training && x.numel() > 0) {
      mask.bernoulli_(1 - p, own_generator());
      dropped = x.mul(mask).mul_(p < 1 ? 1 / (1 - p) : 0.0);
    }
    host = {dropped, mask};
  }

  // Other operators that draw without taking a generator find the device's state in the host's.
  void run_with_lent_generator(Stack& host) {
    static std::mutex one_at_a_time;
    std::lock_guard<std::mutex> lock(one_at_a_time);
    auto lent = at::globalContext().defaultGenerator(c10::Device(c10::kCPU));
    struct Restore {
      at::Generator& generator;
      Tensor state;
      ~Restore() { generator.set_state(state); }
    } restore{lent, lent.get_state()};
    lent.set_state(own_generator().get_state());
    redispatch(host);
    own_generator().set_state(lent.get_state());
  }

  // Results, from the host to the device.

  // A kernel may resize the storage of a tensor, and has then allocated on the host.
  void adopt_what_was_resized() {
    for (auto& each : twins_) {
      if (each.host.data() == each.address) continue;
      auto size = static_cast<int64_t>(each.host.nbytes());
      auto memory = each.host.set_data_ptr(c10::DataPtr());
      {
        std::lock_guard<std::mutex> lock(simulation().mutex);
        int stream = index_of(current_stream(device_));
        simulation().streams.tick(stream);
        simulation().memory.allocate(memory.get(), size, stream, "an allocation");
      }
      each.device.set_data_ptr_noswap(Holder::of_memory(std::move(memory), device_));
      each.device.set_nbytes(size);
    }
    for (const auto& each : given_)
      if (each.written && (each.host.sizes() != each.device.sizes() ||
                           each.host.strides() != each.device.strides()))
        set_geometry(each.device, each.host);
  }

  IValue result_on_device(const IValue& value) {
    if (value.isTensor()) return tensor_on_device(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> out;
      for (const Tensor& each : value.toTensorList()) out.push_back(tensor_on_device(each));
      return out;
    }
    return value;
  }

  Tensor tensor_on_device(const Tensor& host) {
    returns_tensors_ = true;
    if (!host.defined()) return host;
    for (const auto& each : given_)
      if (each.host.is_same(host)) return each.device;
    for (const auto& each : twins_)
      if (each.host.is_alias_of(host.storage())) return view_on_device(each.device, host);
    return new_on_device(host);
  }

  Tensor new_on_device(const Tensor& host) {
    c10::Storage own = host.storage();
    c10::Storage storage(c10::Storage::use_byte_size_t(), own.nbytes(),
        Holder::of_storage(own, device_), &allocator, true);
    twins_.push_back({storage, own, own.data()});
    auto key = c10::DispatchKeySet(c10::DispatchKey::CUDA);
    auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), key, host.dtype());
    set_geometry(made, host);
    made_.push_back(made);
    return made;
  }

  Tensor view_on_device(const c10::Storage& storage, const Tensor& host) {
    // A view is one of inference mode if what it is a view of is.
    auto key = c10::DispatchKeySet(c10::DispatchKey::CUDA);
    for (const auto& each : given_)
      if (each.device.storage().is_alias_of(storage)) key = each.device.key_set();
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(storage), key, host.dtype());
    set_geometry(made, host);
    return made;
  }

  void tell_the_simulation() {
    bool writes = std::any_of(given_.begin(), given_.end(), [](auto& each) { return each.written; });
    bool only_views = returns_tensors_ && made_.empty() && !writes;
    if (only_views) return;
    std::lock_guard<std::mutex> lock(simulation().mutex);
    int stream = index_of(current_stream(device_));
    simulation().streams.tick(stream);
    for (const auto& each : given_) note(each.device, stream, each.written, name_);
    for (const auto& each : made_) {
      auto size = static_cast<int64_t>(each.storage().nbytes());
      simulation().memory.allocate(each.storage().data(), size, stream, name_);
    }
    bool host_needs_values = starts_with_any(name_, {"aten::_local_scalar_dense", "aten::equal",
        "aten::is_nonzero", "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::unique"});
    if (host_needs_values) simulation().streams.host_waits_for_stream(stream);
  }

  const c10::OperatorHandle& op_;
  std::string name_;
  int device_ = -1;
  bool returns_tensors_ = false;
  std::vector<Given> given_;
  std::vector<Twins> twins_;
  std::vector<Tensor> made_;
};

inline void call(const c10::OperatorHandle& op, Stack* stack) { Call(op).run(stack); }

}  // namespace simulated
