"""Real architectures at tiny sizes: torchvision's classifiers and transformers' models, with their randomness on.

Each maker returns a fresh, seeded Subject and can be pickled; `maker(optimizer)` takes another optimizer than SGD.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from acwb.models import OptimizerMaker, classification_loss, own_loss
from acwb.subject import Subject

# isort: split
# After acwb, which defines the torchvision op that a torch without CUDA may lack.
import transformers
from torchvision.models import (
    AlexNet,
    ConvNeXt,
    DenseNet,
    EfficientNet,
    GoogLeNet,
    Inception3,
    MaxVit,
    MNASNet,
    MobileNetV2,
    MobileNetV3,
    RegNet,
    ResNet,
    ShuffleNetV2,
    SqueezeNet,
    SwinTransformer,
    VisionTransformer,
)
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.efficientnet import FusedMBConvConfig, MBConvConfig
from torchvision.models.inception import (
    BasicConv2d,
    InceptionA,
    InceptionAux,
    InceptionB,
    InceptionC,
    InceptionD,
    InceptionE,
)
from torchvision.models.mobilenetv3 import InvertedResidualConfig
from torchvision.models.regnet import BlockParams
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2
from torchvision.models.vgg import VGG, make_layers
from torchvision.models.vision_transformer import ConvStemConfig

Batch = dict[str, Any]

CLASSES = 10
BATCH_SIZE = 2  # batch norm needs two values per channel
LENGTH = 12
VOCABULARY = 100


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def image_subject(
    build: Callable[[], nn.Module],
    size: int,
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    optimizer: OptimizerMaker = momentum,
) -> Subject:
    """A torchvision model on random images of `size` by `size` pixels."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = build()
        batch = (torch.randn(BATCH_SIZE, 3, size, size), torch.randint(CLASSES, (BATCH_SIZE,)))
    return Subject(build.__name__, model, batch, loss_fn, optimizer(model.parameters()))


def loss_with_auxiliary_heads(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    scores, *auxiliary = model(images)
    loss = functional.cross_entropy(scores, labels)
    return loss + 0.3 * sum(functional.cross_entropy(each, labels) for each in auxiliary)


def with_narrow_classifier(build: Callable[[], Any], inputs: int, width: int = 32) -> nn.Module:
    """AlexNet or VGG without the 50 to 120 million parameters of the classifier, which no argument makes smaller."""
    with torch.device("meta"):
        model = build()
    sizes = [(inputs, width), (width, width), (width, CLASSES)]
    linears = [place for place, layer in enumerate(model.classifier) if isinstance(layer, nn.Linear)]
    for place, (fan_in, fan_out) in zip(linears, sizes, strict=True):
        model.classifier[place] = nn.Linear(fan_in, fan_out)
    model.to_empty(device="cpu")
    for layer in model.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear, nn.BatchNorm2d)):
            layer.reset_parameters()
    return model


def alexnet() -> nn.Module:
    return with_narrow_classifier(partial(AlexNet, CLASSES, dropout=0.3), 256 * 6 * 6)


def small_vgg(batch_norm: bool) -> nn.Module:
    features = make_layers([8, "M", 16, 16, "M"], batch_norm)
    return with_narrow_classifier(partial(VGG, features, CLASSES, dropout=0.3), 16 * 7 * 7)


def vgg() -> nn.Module:
    return small_vgg(batch_norm=False)


def vgg_bn() -> nn.Module:
    return small_vgg(batch_norm=True)


def convnext() -> nn.Module:
    blocks = [CNBlockConfig(8, 16, 1), CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 1)]
    return ConvNeXt(blocks, stochastic_depth_prob=0.3, layer_scale=0.1, num_classes=CLASSES)


def densenet() -> nn.Module:
    return DenseNet(8, (2, 2, 2, 2), 16, bn_size=2, drop_rate=0.1, num_classes=CLASSES)


def efficientnet() -> nn.Module:
    blocks = [MBConvConfig(1, 3, 1, 8, 8, 1), MBConvConfig(4, 5, 2, 8, 16, 2), MBConvConfig(4, 3, 2, 16, 24, 2)]
    return EfficientNet(blocks, dropout=0.2, stochastic_depth_prob=0.3, num_classes=CLASSES, last_channel=64)


def efficientnet_v2() -> nn.Module:
    blocks = [
        FusedMBConvConfig(1, 3, 1, 8, 8, 1),
        FusedMBConvConfig(4, 3, 2, 8, 16, 2),
        MBConvConfig(4, 3, 2, 16, 24, 2),
    ]
    return EfficientNet(blocks, dropout=0.2, stochastic_depth_prob=0.3, num_classes=CLASSES, last_channel=64)


def without(model: nn.Module, *names: str) -> nn.Module:
    """The model without some blocks that change no shape."""
    for name in names:
        setattr(model, name, nn.Identity())
    return model


def googlenet() -> nn.Module:
    model = GoogLeNet(CLASSES, aux_logits=True, transform_input=True, init_weights=False)
    return without(model, "inception4b", "inception4c", "inception5a")


class EnlargingInceptionAux(InceptionAux):
    """The auxiliary head of Inception v3, which needs the 17 by 17 values that images of 299 pixels give."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(functional.adaptive_avg_pool2d(x, 17))


def inception_v3() -> nn.Module:
    blocks = [BasicConv2d, InceptionA, InceptionB, InceptionC, InceptionD, InceptionE, EnlargingInceptionAux]
    model = Inception3(CLASSES, transform_input=True, inception_blocks=blocks, init_weights=False)
    return without(model, "Mixed_5d", "Mixed_6c", "Mixed_6d", "Mixed_6e", "Mixed_7c")


def maxvit() -> nn.Module:
    return MaxVit(
        input_size=(32, 32),
        stem_channels=8,
        partition_size=4,
        block_channels=[8, 16],
        block_layers=[1, 1],
        head_dim=8,
        stochastic_depth_prob=0.3,
        mlp_dropout=0.1,
        attention_dropout=0.1,
        num_classes=CLASSES,
    )


def mnasnet() -> nn.Module:
    return MNASNet(0.25, CLASSES)


def mobilenet_v2() -> nn.Module:
    blocks = [[1, 8, 1, 1], [6, 16, 2, 2], [6, 24, 2, 2]]
    return MobileNetV2(CLASSES, width_mult=0.25, inverted_residual_setting=blocks)


def mobilenet_v3_small() -> nn.Module:
    blocks = [
        InvertedResidualConfig(8, 3, 8, 8, True, "RE", 2, 1, 1.0),
        InvertedResidualConfig(8, 5, 32, 16, True, "HS", 2, 1, 1.0),
        InvertedResidualConfig(16, 5, 48, 16, True, "HS", 1, 1, 1.0),
    ]
    return MobileNetV3(blocks, 64, CLASSES)


def mobilenet_v3_large() -> nn.Module:
    blocks = [
        InvertedResidualConfig(8, 3, 8, 8, False, "RE", 1, 1, 1.0),
        InvertedResidualConfig(8, 5, 32, 16, True, "RE", 2, 1, 1.0),
        InvertedResidualConfig(16, 3, 48, 24, False, "HS", 2, 1, 1.0),
        InvertedResidualConfig(24, 5, 96, 24, True, "HS", 1, 2, 1.0),
    ]
    return MobileNetV3(blocks, 64, CLASSES)


def regnet_x() -> nn.Module:
    blocks = BlockParams([1, 1, 2], [8, 16, 24], [8, 8, 8], [1.0] * 3, [2] * 3)
    return RegNet(blocks, CLASSES, stem_width=8)


def regnet_y() -> nn.Module:
    blocks = BlockParams([1, 1, 2], [8, 16, 24], [8, 8, 8], [1.0] * 3, [2] * 3, se_ratio=0.25)
    return RegNet(blocks, CLASSES, stem_width=8)


def resnet_of_basic_blocks() -> nn.Module:
    return ResNet(BasicBlock, [1, 1, 1, 1], CLASSES)


def resnet_of_bottlenecks() -> nn.Module:
    return ResNet(Bottleneck, [1, 1, 1, 1], CLASSES, width_per_group=16)


def resnet_with_dilation() -> nn.Module:
    dilated = [False, True, True]
    return ResNet(Bottleneck, [1, 1, 1, 1], CLASSES, width_per_group=16, replace_stride_with_dilation=dilated)


def resnext() -> nn.Module:
    return ResNet(Bottleneck, [1, 1, 1, 1], CLASSES, groups=8, width_per_group=4)


def wide_resnet() -> nn.Module:
    return ResNet(Bottleneck, [1, 1, 1, 1], CLASSES, width_per_group=128)


def shufflenet_v2() -> nn.Module:
    return ShuffleNetV2([1, 2, 1], [8, 16, 32, 64, 64], CLASSES)


def squeezenet1_0() -> nn.Module:
    return SqueezeNet("1_0", CLASSES)


def squeezenet1_1() -> nn.Module:
    return SqueezeNet("1_1", CLASSES)


def small_swin(**version: Any) -> nn.Module:
    return SwinTransformer(
        patch_size=[4, 4],
        embed_dim=16,
        depths=[2, 1],
        num_heads=[2, 4],
        window_size=[4, 4],
        mlp_ratio=2.0,
        dropout=0.1,
        attention_dropout=0.1,
        stochastic_depth_prob=0.2,
        num_classes=CLASSES,
        **version,
    )


def swin() -> nn.Module:
    return small_swin()


def swin_v2() -> nn.Module:
    return small_swin(block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2)


def small_vit(**stem: Any) -> nn.Module:
    model = VisionTransformer(
        image_size=32,
        patch_size=8,
        num_layers=2,
        num_heads=2,
        hidden_dim=32,
        mlp_dim=64,
        dropout=0.1,
        attention_dropout=0.1,
        num_classes=CLASSES,
        **stem,
    )
    nn.init.normal_(model.heads.head.weight)  # zero by default, and then the first gradients are zero too
    return model


def vit() -> nn.Module:
    return small_vit()


def vit_with_convolutional_stem() -> nn.Module:
    stem = [ConvStemConfig(8, 3, 2), ConvStemConfig(16, 3, 2), ConvStemConfig(16, 3, 2)]
    return small_vit(representation_size=16, conv_stem_configs=stem)


def on_images(build: Callable[[], nn.Module], size: int = 32, loss_fn: Any = classification_loss) -> partial[Subject]:
    return partial(image_subject, build, size, loss_fn)


TORCHVISION: dict[str, Callable[..., Subject]] = {
    "alexnet": on_images(alexnet, 64),
    "convnext": on_images(convnext),
    "densenet": on_images(densenet),
    "efficientnet": on_images(efficientnet),
    "efficientnet_v2": on_images(efficientnet_v2),
    "googlenet": on_images(googlenet, 32, loss_with_auxiliary_heads),
    "inception_v3": on_images(inception_v3, 75, loss_with_auxiliary_heads),
    "maxvit": on_images(maxvit),
    "mnasnet": on_images(mnasnet, 64),
    "mobilenet_v2": on_images(mobilenet_v2),
    "mobilenet_v3_large": on_images(mobilenet_v3_large),
    "mobilenet_v3_small": on_images(mobilenet_v3_small),
    "regnet_x": on_images(regnet_x),
    "regnet_y": on_images(regnet_y),
    "resnet_of_basic_blocks": on_images(resnet_of_basic_blocks),
    "resnet_of_bottlenecks": on_images(resnet_of_bottlenecks),
    "resnet_with_dilation": on_images(resnet_with_dilation),
    "resnext": on_images(resnext),
    "shufflenet_v2": on_images(shufflenet_v2, 64),
    "squeezenet1_0": on_images(squeezenet1_0),
    "squeezenet1_1": on_images(squeezenet1_1),
    "swin": on_images(swin),
    "swin_v2": on_images(swin_v2),
    "vgg": on_images(vgg),
    "vgg_bn": on_images(vgg_bn),
    "vit": on_images(vit),
    "vit_with_convolutional_stem": on_images(vit_with_convolutional_stem),
    "wide_resnet": on_images(wide_resnet),
}


def transformers_subject(
    architecture: str,
    settings: dict[str, Any],
    make_batch: Callable[[], Batch],
    optimizer: OptimizerMaker = momentum,
) -> Subject:
    """A model of transformers, by the name of its class, with the settings that make its configuration small."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # DeBERTa's module calls torch.jit.script
        build = getattr(transformers, architecture)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = build(build.config_class(**settings)).train()
        batch = make_batch()
    for part in model.modules():
        if hasattr(part, "layerdrop"):
            # In training these draw a number per layer to decide, even at 0, and a capture cannot follow a decision.
            part.training = False
    return Subject(architecture, model, batch, own_loss, optimizer(model.parameters()))


def padded_text() -> Batch:
    """Tokens that are not special ones, the second row padded."""
    tokens = torch.randint(5, VOCABULARY, (BATCH_SIZE, LENGTH))
    mask = torch.ones_like(tokens)
    mask[1, LENGTH - 4 :] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def text_with_a_class() -> Batch:
    return {**padded_text(), "labels": torch.randint(CLASSES, (BATCH_SIZE,))}


def text_with_classes_of_tokens() -> Batch:
    return {**padded_text(), "labels": torch.randint(CLASSES, (BATCH_SIZE, LENGTH))}


def text_with_a_span() -> Batch:
    starts = torch.randint(LENGTH // 2, (BATCH_SIZE,))
    return {**padded_text(), "start_positions": starts, "end_positions": starts + 2}


def text_to_restore() -> Batch:
    """Labels at a few tokens, as for masked language models."""
    text = padded_text()
    chosen = torch.rand(BATCH_SIZE, LENGTH) < 0.3
    chosen[:, 0] = True
    return {**text, "labels": text["input_ids"].masked_fill(~chosen, -100)}


def text_to_continue() -> Batch:
    text = padded_text()
    return {**text, "labels": text["input_ids"].masked_fill(text["attention_mask"] == 0, -100)}


def text_to_translate() -> Batch:
    return {**padded_text(), "labels": torch.randint(5, VOCABULARY, (BATCH_SIZE, LENGTH - 3))}


def images_with_a_class() -> Batch:
    return {"pixel_values": torch.randn(BATCH_SIZE, 3, 32, 32), "labels": torch.randint(CLASSES, (BATCH_SIZE,))}


def images_with_captions() -> Batch:
    return {**padded_text(), "pixel_values": torch.randn(BATCH_SIZE, 3, 32, 32), "return_loss": True}


# The names of settings differ from family to family; the sizes are alike.
LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 32}
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
ENCODER = LAYERS | TEXT | DROPOUT | {"num_labels": CLASSES}
DECODER = LAYERS | TEXT | {"attention_dropout": 0.1, "use_cache": False}
GROUPED = DECODER | {"num_key_value_heads": 1}  # both heads of queries share one of keys and values
GPT = {"vocab_size": VOCABULARY, "n_positions": 32, "n_layer": 2, "n_head": 2, "n_embd": 32, "use_cache": False}
GPT |= {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "bos_token_id": 0, "eos_token_id": 0}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
T5 |= {"dropout_rate": 0.1, "decoder_start_token_id": 0, "use_cache": False}
BART = TEXT | {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
BART |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "use_cache": False}
BART |= {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1}
BART |= {"pad_token_id": 0, "decoder_start_token_id": 0}
VISION = LAYERS | DROPOUT | {"image_size": 32, "patch_size": 8, "num_labels": CLASSES}
DISTILBERT = TEXT | {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "dropout": 0.1, "attention_dropout": 0.1}
GPT_NEO = TEXT | {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "window_size": 4, "use_cache": False}
GPT_NEO |= {"attention_types": [[["global", "local"], 1]], "resid_dropout": 0.1, "embed_dropout": 0.1}
GPT_NEO |= {"attention_dropout": 0.1, "bos_token_id": 0, "eos_token_id": 0}
XLNET = {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64, "num_labels": CLASSES}
CONVNEXT = {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2, "num_labels": CLASSES}
CONVNEXT |= {"drop_path_rate": 0.2, "layer_scale_init_value": 0.1}
SEGFORMER = {"num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [8, 16], "num_attention_heads": [1, 2]}
SEGFORMER |= {"sr_ratios": [2, 1], "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2]}
SEGFORMER |= DROPOUT | {"drop_path_rate": 0.2, "num_labels": CLASSES}
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4}
SWIN |= DROPOUT | {"drop_path_rate": 0.2, "num_labels": CLASSES}
CLIP_PART = LAYERS | {"attention_dropout": 0.1, "projection_dim": 16}
CLIP = {
    "text_config": CLIP_PART | TEXT | {"bos_token_id": 0, "eos_token_id": 2},
    "vision_config": CLIP_PART | {"image_size": 32, "patch_size": 8},
    "projection_dim": 16,
}


def configured(
    architecture: str, settings: dict[str, Any], make_batch: Callable[[], Batch], **more: Any
) -> partial[Subject]:
    return partial(transformers_subject, architecture, settings | more, make_batch)


TRANSFORMERS: dict[str, Callable[..., Subject]] = {
    "albert": configured("AlbertForMaskedLM", ENCODER, text_to_restore, embedding_size=16),
    "bert": configured("BertForSequenceClassification", ENCODER, text_with_a_class),
    "deberta_v2": configured(
        "DebertaV2ForMaskedLM",
        ENCODER,
        text_to_restore,
        relative_attention=True,
        position_buckets=4,
        pos_att_type=["p2c", "c2p"],
    ),
    "distilbert": configured("DistilBertForQuestionAnswering", DISTILBERT, text_with_a_span),
    "electra": configured("ElectraForTokenClassification", ENCODER, text_with_classes_of_tokens, embedding_size=16),
    "fnet": configured("FNetForMaskedLM", ENCODER, text_to_restore),
    "mpnet": configured("MPNetForMaskedLM", ENCODER, text_to_restore),
    "roberta": configured("RobertaForMaskedLM", ENCODER, text_to_restore),
    "roformer": configured("RoFormerForMaskedLM", ENCODER, text_to_restore),
    "xlnet": configured("XLNetForTokenClassification", XLNET, text_with_classes_of_tokens),
    "bloom": configured("BloomForCausalLM", DECODER, text_to_continue, n_layer=2, n_head=2, hidden_dropout=0.1),
    "falcon": configured("FalconForCausalLM", DECODER, text_to_continue, hidden_dropout=0.1),
    "gemma2": configured("Gemma2ForCausalLM", GROUPED, text_to_continue, head_dim=16, sliding_window=4),
    "gpt2": configured("GPT2LMHeadModel", GPT, text_to_continue),
    "gpt_neo": configured("GPTNeoForCausalLM", GPT_NEO, text_to_continue),
    "gpt_neox": configured("GPTNeoXForCausalLM", DECODER, text_to_continue, hidden_dropout=0.1),
    "gptj": configured("GPTJForCausalLM", GPT, text_to_continue, rotary_dim=8),
    "llama": configured("LlamaForCausalLM", GROUPED, text_to_continue),
    "mamba": configured("MambaForCausalLM", DECODER, text_to_continue, state_size=4),
    "mistral": configured("MistralForCausalLM", GROUPED, text_to_continue, sliding_window=4),
    "opt": configured("OPTForCausalLM", DECODER, text_to_continue, ffn_dim=64, dropout=0.1, word_embed_proj_dim=16),
    "phi": configured("PhiForCausalLM", DECODER, text_to_continue, resid_pdrop=0.1, embd_pdrop=0.1),
    "qwen2": configured("Qwen2ForCausalLM", GROUPED, text_to_continue),
    "bart": configured("BartForConditionalGeneration", BART, text_to_translate),
    "marian": configured("MarianMTModel", BART, text_to_translate),
    "pegasus": configured("PegasusForConditionalGeneration", BART, text_to_translate),
    "mt5": configured("MT5ForConditionalGeneration", T5, text_to_translate, feed_forward_proj="gated-gelu"),
    "t5": configured("T5ForConditionalGeneration", T5, text_to_translate),
    "umt5": configured("UMT5ForConditionalGeneration", T5, text_to_translate, num_decoder_layers=1),
    "beit": configured(
        "BeitForImageClassification", VISION, images_with_a_class, drop_path_rate=0.2, use_relative_position_bias=True
    ),
    "clip": configured("CLIPModel", CLIP, images_with_captions),
    "convnext": configured("ConvNextForImageClassification", CONVNEXT, images_with_a_class),
    "deit": configured("DeiTForImageClassification", VISION, images_with_a_class),
    "dinov2": configured("Dinov2ForImageClassification", VISION, images_with_a_class, drop_path_rate=0.2),
    "segformer": configured("SegformerForImageClassification", SEGFORMER, images_with_a_class),
    "swin": configured("SwinForImageClassification", SWIN, images_with_a_class),
    "vit": configured("ViTForImageClassification", VISION, images_with_a_class),
}
