"""Every family of causal language models that the installed transformers has: its FLOPs are torch's or are refused."""

import functools
import json
import re
import shutil

import families
import pytest
import torch
from conftest import forked, parse, train, words
from safetensors.torch import load_file
from tiny import build, take_steps
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import utils
from harness import model as models
from harness.base import UserError
from harness.model import flops, loss, pretrained
from harness.model.configs import find_training_obstacle, load_config
from harness.model.context import ContextGroup
from harness.model.lora import decoder_linears
from harness.model.matrices import matrix_weights
from harness.model.optimization import decay_matrices
from harness.model.routing import watch_routers
from harness.state import exports

CPU = torch.device("cpu")
TOKENS = torch.arange(2, 34)[None]


@pytest.mark.slow
def test_flops_of_every_family_are_those_of_real_tensors_or_refused(monkeypatch):
    monkeypatch.setattr(flops, "MAX_OPERATORS", 50_000)
    counted, refused = 0, []
    for name in families.families():
        try:
            config = families.small_config(name)
            families.check_size(config)
        except Exception:  # what transformers does not build small has nothing to compare with
            continue
        config._attn_implementation = "eager"
        try:
            found = utils.get_model_flops_per_token(config, families.SEQUENCE)
        except ValueError as error:
            refused.append(str(error))
            continue
        assert found == round(families.flops_on_real_tensors(config)), name
        counted += 1
    assert all(refused)
    assert counted > 150


def trainable_configs():
    """(name, small config) of each family that transformers builds small and that is not refused."""
    for name in families.families():
        try:
            config = families.small_config(name)
            families.check_size(config)
        except Exception:
            continue
        if not find_training_obstacle(config):
            yield name, config


def materialized(config, dtype=torch.float32, folder=None):
    """A model as a run builds it, not sharded; with the weights of a folder if one is given."""
    model = models.on_meta(config, "eager", dtype)
    layers = models.decoder_layers(model)
    source = models.find_source(str(folder))
    weights = pretrained.PretrainedWeights(model, layers, source, dtype) if folder else None
    in_layers = [list(layer.modules()) for layer in layers]
    outside = set(model.modules()) - {module for modules in in_layers for module in modules}
    torch.manual_seed(0)
    models.materialize(model, [module for module in model.modules() if module in outside], CPU, weights)
    for index, modules in enumerate(in_layers):
        models.materialize(model, modules, CPU, weights, index)
    return model


def tensors_of(model):
    return dict(model.named_parameters()) | dict(model.named_buffers())


@pytest.mark.slow
def test_the_weights_of_every_family_are_drawn_loaded_and_named_as_by_transformers(device, tmp_path):
    """Its constructor in fp32, from_pretrained in bf16: equal values and dtypes, of buffers too; save_pretrained."""
    wrong, compared, mesh = [], 0, init_device_mesh("cpu", (1,))
    for name, config in trainable_configs():
        torch.manual_seed(1)
        theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        try:
            drawn = tensors_of(materialized(config))
        except UserError:  # refused in one line
            continue
        compared += 1
        for key, expected in tensors_of(theirs).items():
            scale = expected.double().std(correction=0).item()
            if expected.numel() > 500 and scale and abs(drawn[key].double().std(correction=0) / scale - 1) > 0.2:
                wrong.append((name, "drawn", key))
        for tensor in theirs.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn_like(tensor) * 0.3 + 1)
        folder = tmp_path / name
        theirs.save_pretrained(folder)
        if names_of_export(config, mesh) != load_file(folder / "model.safetensors").keys():
            wrong.append((name, "exported", ""))
        try:
            read = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
        except ValueError:  # the config of a family's text part, which AutoModelForCausalLM does not read back
            continue
        loaded = tensors_of(materialized(AutoConfig.from_pretrained(folder), torch.bfloat16, folder))
        for key, expected in tensors_of(read).items():
            if name == "zaya" and key.endswith("balancing_biases"):  # from_pretrained overwrites the last of them
                expected = theirs.get_buffer(key)
            if loaded[key].dtype != expected.dtype or not torch.equal(loaded[key], expected):
                wrong.append((name, "loaded", key))
        shutil.rmtree(folder)
    assert not wrong
    assert compared > 135  # 139 and more with transformers 5.17


def names_of_export(config, mesh):
    """The names of tensors in an export of a sharded model."""
    model = models.on_meta(config)
    fully_shard(model, mesh=mesh)
    tensors = exports.exported_tensors(parse(["--model", "demo"]), model)
    plain = {name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors.items()}
    return models.as_in_checkpoint(model, plain).keys()


def test_an_export_has_the_names_that_the_class_of_its_model_has_in_checkpoints(device, tmp_path):
    config = families.small_config("deepseek_v4")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert names_of_export(config, init_device_mesh("cpu", (1,))) == load_file(tmp_path / "model.safetensors").keys()


@pytest.mark.parametrize("family", ["mllama", "emu3"])
def test_the_text_part_of_a_family_is_read_from_its_export(tmp_path, family):
    model = models.on_meta(families.small_config(family))
    (tmp_path / "config.json").write_text(json.dumps(exports.model_config(model, None, pretrained=True)))
    read = AutoConfig.from_pretrained(tmp_path)
    assert type(models.on_meta(read)) is type(model)
    assert read.get_text_config().hidden_size == model.config.hidden_size


def test_the_decoder_layers_are_those_of_the_text_although_an_image_tower_has_as_many():
    model = models.on_meta(families.small_config("got_ocr2"))
    assert models.decoder_layers(model) is model.model.language_model.layers


@pytest.mark.parametrize(
    "family, linears, other", [("deepseek_v4", "o_b_proj", "o_a_proj"), ("falcon", "query_key_value", "")]
)
def test_a_subclass_of_linear_that_computes_something_else_has_no_adapters(family, linears, other):
    found = {name.split(".")[-1] for name in decoder_linears(models.on_meta(families.small_config(family)))}
    assert linears in found and other not in found


@pytest.mark.slow
def test_rope_that_is_scaled_is_read_from_the_export_of_every_family_as_it_was_trained(tmp_path):
    compared, refused = 0, []
    for name, config in trainable_configs():
        text = config.get_text_config()
        settings = parse(["--model", "demo", "--rope-scaling", "yarn"])
        try:
            models.scale_rope(settings, config, 4 * (getattr(text, "max_position_embeddings", None) or 1))
        except UserError as error:
            refused += [name] if "does not take its fields" in str(error) else []
            continue
        content = exports.model_config(models.on_meta(config), None, pretrained=True)
        (tmp_path / "config.json").write_text(json.dumps(content))
        read = AutoConfig.from_pretrained(tmp_path).get_text_config()
        assert read.rope_parameters == text.rope_parameters, name
        assert read.rope_parameters["rope_type"] == "yarn"
        compared += 1
    assert compared > 80
    assert refused == ["phi3", "phi4_multimodal", "phimoe"]  # their config classes know longrope only


@pytest.mark.slow
def test_the_tokens_of_every_family_attend_to_none_that_are_later():
    """In transformers 5.17 those of five do, which are refused: of BigBird, Doge, MegatronBERT, RemBERT, RoFormer."""
    tokens = torch.randint(5, 500, (2, 64), generator=torch.Generator().manual_seed(0))
    tokens[1, :40] = tokens[0, :40]
    differences = {}
    for name, config in trainable_configs():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.08)  # by default attention would hardly matter
        try:
            with torch.no_grad():
                one, other = (model(input_ids=row[None], use_cache=False).logits[:, :40] for row in tokens)
        except RuntimeError:  # it has no forward with so small sizes
            continue
        differences[name] = (one - other).abs().max().item()
    assert {name: difference for name, difference in differences.items() if not difference < 1e-4} == {}
    assert len(differences) > 135


@pytest.mark.slow
def test_the_load_of_every_router_is_that_of_its_experts():
    """Also with a correction bias, which changes the choice and not the logits."""
    compared = []
    for name, config in trainable_configs():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        watch_routers(model, "random", ContextGroup())
        if not model.routing:
            continue
        for key, tensor in model.state_dict().items():
            if key.endswith("e_score_correction_bias"):
                tensor.copy_(torch.arange(tensor.numel()).view_as(tensor))
        used: list[torch.Tensor] = []
        record = functools.partial(lambda used, module, inputs: used.append(inputs[1]), used)
        for path, module in model.named_modules():
            if path.endswith(".experts"):
                module.register_forward_pre_hook(record)
        tokens = torch.randint(1, 500, (2, 32))
        loss = model.train()(input_ids=tokens, labels=tokens, use_cache=False).loss
        _, load = model.routing.read()
        expected = torch.stack([chosen.flatten().bincount(minlength=load.shape[1]) for chosen in used])
        assert torch.equal(load, expected[-len(load) :].float()), name  # deepseek_v4's first layers have no router
        assert loss == model(input_ids=tokens, labels=tokens, use_cache=False, output_router_logits=True).loss
        compared.append(name)
    assert {"jamba", "minimax_m2", "phimoe", "qwen3_moe"} < set(compared)
    assert len(compared) > 17  # 18 with transformers 5.17


def test_a_router_of_product_keys_is_not_watched():
    config = families.small_config("doge")
    config.update({"is_moe": True, "num_experts": 16})
    model = models.on_meta(config)
    watch_routers(model, "random", ContextGroup())
    assert model.routing is None


def test_a_router_loss_that_is_not_known_is_no_part_of_the_loss():
    config = families.small_config("jetmoe")
    config.output_router_logits = True
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tokens = torch.randint(1, 500, (2, 32))
    mixed = model(input_ids=tokens, labels=tokens, use_cache=False)
    watch_routers(model, "pretrained", ContextGroup())
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    router_loss = 0 if mixed.aux_loss is None else config.aux_loss_coef * mixed.aux_loss  # transformers 5.17 has none
    assert torch.isclose(loss, mixed.loss - router_loss)
    assert (
        models.describe_routing(model) == "JetMoeForCausalLM has no router loss here, so nothing balances its experts"
    )


@pytest.mark.slow
def test_weight_decay_and_muon_take_matrices_of_every_family_and_no_norm_bias_or_single_row():
    settings, compared = parse(["--model", "demo", "--weight-decay", "0.1"]), 0
    for name, config in trainable_configs():
        if name == "cohere":
            config.use_qk_norm = True  # with norms of two dimensions
        model = models.on_meta(config)
        try:
            by_muon = {id(weight.parameter) for weight in matrix_weights(model).values()}
        except UserError:  # refused in one line
            continue
        decayed = {id(parameter) for parameter in decay_matrices(model, settings)[0]["params"]}
        for key, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            is_vector = parameter.dim() < 2 or bool(re.search(r"norm\w*\.weight$|bias$|A_log$", key))
            assert (id(parameter) in decayed) != is_vector, (name, key)
            if id(parameter) in by_muon:
                assert not is_vector and min(parameter.shape[-2:]) > 1, (name, key)
        compared += 1
    assert compared > 135  # 139 and more with transformers 5.17


@pytest.mark.slow
def test_families_of_each_kind_train_the_same_on_one_rank_and_two(tmp_path):
    kinds = ["mamba2", "qwen3_next", "llama4_text", "gemma3n_text", "xlstm", "bert"]
    found = []
    for ranks in (1, 2):
        forked(ranks, families.walk, kinds, tmp_path / str(ranks))
        lines = map(json.loads, (tmp_path / str(ranks)).read_text().splitlines())
        found.append({line["family"]: line for line in lines})
    verdicts = {name: families.compare_ranks(found[0][name], found[1][name]) for name in kinds}
    assert {name: verdict["verdict"] for name, verdict in verdicts.items()} == dict.fromkeys(kinds, "trains"), verdicts


@pytest.mark.parametrize(
    "family, sizes, reason",
    [
        ("bart", {}, "computes a loss of its own"),
        ("bert", {"is_decoder": False}, "attend to later ones"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "attend to later ones"),
        ("llama", {"is_causal": False}, "attend to later ones"),
        ("opt", {"layerdrop": 0.1}, "set layerdrop to 0"),
    ],
)
def test_a_family_that_would_train_wrong_is_refused_before_anything_is_built(tmp_path, family, sizes, reason):
    config = families.small_config(family)
    config.update(sizes)
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=reason):
        load_config(str(tmp_path))


@pytest.mark.parametrize(
    "family, what", [("apertus", "XIELUActivation.alpha_p gets no value"), ("git", "shifts labels")]
)
def test_what_shows_only_later_stops_the_run_before_its_first_update(tmp_path, device, family, what):
    families.small_config(family).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=what):
        families.train(tmp_path, device)


def test_selective_checkpointing_of_layers_that_change_results_of_matmuls_in_place_is_refused(tmp_path, device):
    families.small_config("gemma3n_text").save_pretrained(tmp_path)
    flags = f"--model {tmp_path} --activation-checkpointing selective --no-compile --sequence-length 32 --lr 0.1"
    with pytest.raises(UserError, match="in place; use full"):
        take_steps(*build(words(flags)), iter([{"input_ids": TOKENS, "labels": TOKENS}]), 1)


def test_a_layer_gets_in_bf16_training_what_its_family_computes_in_fp32(tmp_path, device):
    families.small_config("mpt").save_pretrained(tmp_path)
    flags = f"--model {tmp_path} --precision bf16 --no-compile --sequence-length 32"
    settings, model, optimizer = build(words(flags))
    seen = []
    layer = models.decoder_layers(model)[0]
    layer.attn.register_forward_pre_hook(
        lambda _, args, given: seen.append(given["position_bias"].dtype), with_kwargs=True
    )
    take_steps(settings, model, optimizer, iter([{"input_ids": TOKENS, "labels": TOKENS}]), 1)
    assert seen == [torch.float32]


class CappedConfig(LlamaConfig):
    model_type = "capped"


class Capped(LlamaForCausalLM):
    config_class = CappedConfig

    def forward(self, *args, **options):
        output = super().forward(*args, **options)
        output.logits = output.logits.tanh_()
        return output


AutoConfig.register("capped", CappedConfig)
AutoModelForCausalLM.register(CappedConfig, Capped)


@pytest.mark.parametrize(
    "family, fields, fused",
    [
        ("llama", {}, True),
        ("granite", {"logits_scaling": 8.0}, True),
        ("gemma2", {}, False),
        ("capped", {}, False),
        ("inkling_text", {"unpadded_vocab_size": 400}, False),  # the forward cuts off what pads the vocabulary
    ],
)
def test_a_head_is_fused_if_its_results_are_the_logits(family, fields, fused):
    config = families.small_config(family)
    config.update(fields)
    assert loss.choose_loss(None, config) is fused


@pytest.mark.slow
def test_the_heads_of_all_families_whose_logits_are_linear_are_fused():
    full = {name for name, config in trainable_configs() if not loss.choose_loss(None, config)}
    newer = {"beam", "inkling2_text"}  # than transformers 5.17
    assert full - newer == {"gemma2", "gemma3n_text", "nanochat", "recurrent_gemma", "vaultgemma", "xlstm"}


def test_a_capped_head_that_was_fused_is_stopped(tmp_path, device, monkeypatch):
    families.small_config("xlstm").save_pretrained(tmp_path)
    monkeypatch.setattr("harness.model.choose_loss", lambda *_: True)
    with pytest.raises(UserError, match="--no-fused-loss"):
        families.train(tmp_path, device)


@pytest.mark.parametrize("flags", ["--precision bf16-pure", "--precision bf16 --lora-rank 2 --export-weights merged"])
def test_what_a_family_keeps_in_fp32_stays_so_in_a_bf16_run_and_its_export(tmp_path, device, flags):
    """Rounding the bias of a router's choice changes the chosen experts."""
    model = AutoModelForCausalLM.from_config(families.small_config("deepseek_v3"), dtype=torch.bfloat16)
    names = [name for name in model.state_dict() if name.endswith("e_score_correction_bias")]
    kept = {name: torch.rand(model.get_parameter_or_buffer(name).shape) for name in names}
    for name, bias in kept.items():
        model.get_parameter_or_buffer(name).data = bias
    model.save_pretrained(tmp_path / "model")
    flags += f" --model {tmp_path}/model --init pretrained --output-dir {tmp_path} --export {tmp_path}/export"
    assert train(words(f"{flags} --dataset synthetic --sequence-length 32 --num-steps 2 --no-compile"), device) == 0
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert {name for name, tensor in exported.items() if tensor.dtype == torch.float32} == kept.keys()
    assert all(torch.equal(exported[name], bias) for name, bias in kept.items())


def test_trained_weights_of_two_dtypes_are_refused(tmp_path, device):
    families.small_config("ernie4_5_moe").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"--precision bf16-pure: ernie4_5_moe keeps .*weight in fp32; use"):
        build(["--model", tmp_path, "--precision", "bf16-pure", "--sequence-length", 32])
