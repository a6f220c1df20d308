"""Several clients at once: each gets what it gets alone."""

import threading

import torch
from order_cases import STEP, batches

import tinker
from tinker import types

CLIENTS, STEPS = 8, 6
PROMPT = types.ModelInput.from_ints([20, 31, 42, 53, 64])


def train(service, number):
    """One client's training. Returns its losses, samples and weights."""
    client = tinker.ServiceClient(base_url=service.url)
    training = client.create_lora_training_client(
        base_model=service.model.name, rank=2 + number % 3, seed=number
    ).result()
    losses = []
    for batch in batches(STEPS, seed=number):
        result = training.forward_backward(batch, "cross_entropy")
        training.optim_step(STEP)
        losses.append(result.result().metrics["loss:sum"])
    sampler = training.save_weights_and_get_sampling_client().result()
    parameters = types.SamplingParams(max_tokens=12, temperature=0.0, stop=[])
    tokens = sampler.sample(PROMPT, 1, parameters).result().sequences[0].tokens
    return losses, tokens, service.weights(training)


def test_each_of_eight_clients_gets_what_it_gets_alone(service):
    alone = [train(service, number) for number in range(CLIENTS)]
    together = [None] * CLIENTS

    def work(number):
        together[number] = train(service, number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    for mine, other in zip(alone, together, strict=True):
        torch.testing.assert_close(torch.tensor(other[0]), torch.tensor(mine[0]), rtol=1e-5, atol=1e-5)
        assert other[1] == mine[1]
        for name, weight in mine[2].items():
            torch.testing.assert_close(other[2][name], weight, rtol=0, atol=1e-5, msg=name)
