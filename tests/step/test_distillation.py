"""Distillation: the divergences are trl's, and loss and every gradient those of the plain model beside a teacher."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shardwright.data.rows.batches import as_batch
from shardwright.data.rows.packing import Columns
from shardwright.data.samples.fitting import SampleOptions, SamplePacker
from shardwright.layout.load_recipe import load_recipe
from shardwright.models.ops.labels import IGNORE, targets
from shardwright.objectives.distill import IDS, LOGPS, TAUGHT, TEACHER, Distillation
from tests.step.test_packing import apart
from tests.support.cases import ROWS, backward, check_step, make_case, plain_model, relative, small_config
from tests.support.chats import byte_tokenizer

LENGTH, WORDS, TOP = 32, 272, 5
BETAS = (0.0, 0.3, 0.5, 1.0)


def made(beta: float, top: int = TOP, temperature: float = 1.0) -> Distillation:
    numbers = {"beta": beta, "temperature": temperature, "teacher_top_k": top, "lmbda": 0.0}
    return Distillation(numbers, LENGTH)


def logits(seed: int, rows: int = 3) -> torch.Tensor:
    return 3 * torch.randn((rows, LENGTH, WORDS), generator=torch.Generator().manual_seed(seed))


def bucketed(logps: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of ``ids`` and of all else, from those of every token."""
    rest = 1 - torch.zeros_like(logps).scatter(-1, ids, 1.0)
    return torch.cat([logps.gather(-1, ids), (logps.exp() * rest).sum(-1, keepdim=True).log()], -1)


def divergence(ours: torch.Tensor, theirs: torch.Tensor, beta: float) -> torch.Tensor:
    """The papers' formulae, on probabilities."""
    p, q = theirs.exp(), ours.exp()
    mixed = beta * p + (1 - beta) * q
    if beta in (0, 1):
        first, second = (p, q) if beta == 0 else (q, p)
        return (first * (first / second).log()).sum(-1)
    return beta * (p * (p / mixed).log()).sum(-1) + (1 - beta) * (q * (q / mixed).log()).sum(-1)


@pytest.mark.parametrize("beta", BETAS)
def test_of_the_whole_vocabulary_it_is_trls_divergence_and_of_a_part_never_more(beta: float) -> None:
    trl = pytest.importorskip("trl.experimental.gkd")
    ours, theirs = logits(0).requires_grad_(), logits(1)
    labels = torch.randint(0, WORDS, ours.shape[:2])
    labels[:, :5] = IGNORE
    for temperature in (1.0, 2.0):
        loss = trl.GKDTrainer.generalized_jsd_loss(ours, theirs, targets(labels), beta, temperature)
        (expected,) = torch.autograd.grad(loss, ours)
        found = {}
        for top in (WORDS, 40, TOP):
            goal = made(beta, top, temperature)
            batch = {"labels": labels, TEACHER: goal.refer(theirs, {})}
            assert batch[TEACHER].shape[1:] == goal.columns[TEACHER]
            found[top] = goal.loss(ours, batch, goal.counts(batch))["distill_loss"]
        assert found[WORDS].item() == pytest.approx(loss.item(), rel=1e-5)
        (gradient,) = torch.autograd.grad(found[WORDS], ours)
        assert relative({"": gradient}, {"": expected})[0] < 1e-5
        assert found[TOP] < 0.99 * found[40] < 0.99 * found[WORDS]


@pytest.mark.parametrize("beta", BETAS)
def test_all_other_tokens_are_one_bucket_however_little_of_them_a_student_thinks(beta: float) -> None:
    ours, theirs, goal = logits(0).double(), logits(1).double(), made(beta)
    labels = torch.randint(0, WORDS, ours.shape[:2])
    ids = theirs.topk(TOP).indices
    ours[0] += 40 * torch.zeros_like(ours[0]).scatter(-1, ids[0], 1.0)  # the rest is below float32's 1 - x
    leaf = ours.clone().requires_grad_()
    shares = (bucketed(each.log_softmax(-1), ids) for each in (leaf, theirs))
    loss = divergence(*shares, beta)[targets(labels) != IGNORE].mean()
    (expected,) = torch.autograd.grad(loss, leaf)
    batch, single = {"labels": labels, TEACHER: goal.refer(theirs, {})}, ours.float().requires_grad_()
    found = goal.loss(single, batch, goal.counts(batch))["distill_loss"]
    (gradient,) = torch.autograd.grad(found, single)
    assert found.item() == pytest.approx(loss.item(), rel=1e-5)
    for row in range(len(ours)):
        assert relative({"": gradient[row]}, {"": expected[row]})[0] < 1e-5


def test_positions_without_a_target_and_a_teacher_who_bars_tokens_give_nothing_that_is_not_finite() -> None:
    theirs = logits(1)
    theirs[..., 3:] = -torch.inf
    for beta in BETAS:
        goal, leaf = made(beta), logits(0).requires_grad_()
        labels = torch.full(leaf.shape[:2], IGNORE)
        labels[0, 4] = 7
        batch = {"labels": labels, TEACHER: goal.refer(theirs, {})}
        batch[TEACHER][0, 5:] = 0  # as rows have it where no target is
        loss = goal.loss(leaf, batch, goal.counts(batch))["distill_loss"]
        (gradient,) = torch.autograd.grad(loss, leaf)
        assert loss.isfinite()
        assert gradient.isfinite().all()
        assert gradient.count_nonzero() == (gradient[0, 3] != 0).sum() > 0


@torch.no_grad()
def says(teacher: torch.nn.Module, **inputs: torch.Tensor) -> torch.Tensor:
    """The teacher's log-probabilities, of words that its tokenizer does not have hardly any."""
    found = 12 * teacher(**inputs, use_cache=False).logits
    found[..., len(byte_tokenizer()) :] -= 50
    return found.log_softmax(-1)


def taught_rows(teacher: torch.nn.Module) -> Columns:
    """Packed rows of samples of random tokens that hold what ``teacher`` says of each, some of them cut."""
    rng, tokenizer = np.random.default_rng(0), byte_tokenizer()
    documents = []
    for _ in range(8 * ROWS):
        tokens = rng.integers(0, 256, rng.integers(2, rng.choice([8, LENGTH + 8]))).tolist()
        first = int(rng.integers(0, len(tokens)))
        (said,) = says(teacher, input_ids=torch.tensor([tokens]))
        logps, ids = said.topk(TOP + 2)
        order = torch.randperm(TOP + 2)
        record = {
            "input_ids": tokens,
            "labels": [IGNORE] * first + tokens[first:],
            IDS: [None if n < max(first, 1) else ids[n - 1][order].tolist() for n in range(len(tokens))],
            LOGPS: [None if n < max(first, 1) else logps[n - 1][order].tolist() for n in range(len(tokens))],
        }
        documents.append(str(TAUGHT.document(record)))
    columns = SamplePacker(tokenizer, TAUGHT, LENGTH, SampleOptions(taught=TOP)).rows(documents)
    chosen = np.linspace(0, len(columns["input_ids"]) - 1, ROWS).astype(int)
    return {name: values[chosen] for name, values in columns.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "beta"), [("llama_tp", 0.5), ("mixtral_ep", 1.0)])
def test_loss_and_every_gradient_are_the_plain_models_beside_a_teacher(recipe: str, beta: float) -> None:
    teacher = plain_model(small_config(load_recipe("llama_fsdp"), vocab_size=WORDS, hidden_size=32))
    config = small_config(load_recipe(recipe), vocab_size=WORDS, num_hidden_layers=1)
    options = {"objective": "distill", "beta": beta, "teacher_top_k": TOP, "sequence_length": LENGTH}
    case = make_case(recipe, config, more=options)
    columns = taught_rows(teacher)
    assert columns["segment_ids"].max() > 2
    batch = apart(columns)
    scored = targets(batch["labels"]) != IGNORE
    router = {"output_router_logits": True} if case.recipe.compute.router_loss else {}
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    said = says(teacher, **inputs)
    found = case.gradients(as_batch(columns))
    output = case.reference(**inputs, **router, use_cache=False)
    ids = said.topk(TOP).indices
    shares = (bucketed(each, ids) for each in (output.logits.log_softmax(-1), said))
    plain = divergence(*shares, beta)[scored].mean()
    if router:
        plain = plain + config.router_aux_loss_coef * output.aux_loss
    check_step(found, backward(plain, case.reference))
