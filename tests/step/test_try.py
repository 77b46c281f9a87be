import pytest, torch
from tests.step.test_adapters import check_gradients
from tests.support.adapters import make_adapted
pytestmark = [pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"), pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")]
CASES = {
 "dropout": ("llama_tp", 2, {"lora_dropout": 0.3, "rank_pattern": "layers.1.self_attn.q_proj=6,v_proj=2", "alpha_pattern": "k_proj=3", "modules_to_save": "lm_head,embed_tokens,norm"}),
 "dora": ("llama_fsdp", 1, {"use_dora": True, "lora_dropout": 0.2}),
 "dora0": ("llama_tp", 1, {"use_dora": True, "init_lora_weights": "olora", "use_rslora": True}),
 "pissa": ("llama_tp", 1, {"init_lora_weights": "pissa", "layers_to_transform": "1", "exclude_modules": "v_proj"}),
 "experts": ("mixtral_fsdp", 1, {"lora_target": "q_proj,experts.down_proj,experts.gate_up_proj", "rank_pattern": "layers.1.mlp.experts.down_proj=2", "alpha_pattern": "gate_up_proj=3.5"}),
 "int8": ("llama_fsdp", 1, {"use_dora": True, "base_dtype": "int8"}),
}
@pytest.mark.parametrize("name", CASES)
def test_it(name):
    recipe, acc, options = CASES[name]
    check_gradients(make_adapted(recipe, accumulation=acc, options=options, **({"experts":"dropless"} if "mixtral" in recipe else {})))
