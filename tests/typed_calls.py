"""Valid and invalid calls for the type checker: `ty` must report the lines marked `wrong` and no others."""

import dataclasses
from typing import Any

import torch

import vitrail

model = vitrail.create("ViT-B/16", classes=10, resolution=(96, 192), pool="gap", position_at=None)
vitrail.create("R50+ViT-B/16", stem_layers=[3, 4, 9], registers=4, drop_path=0.1)
vitrail.create("BiT-R50x1", layers=(3, 4, 6, 3), edges="zeros")
others: dict[str, Any] = {"petals": 3}
vitrail.create("extension", **others)
vitrail.create("ViT-B/16", reslution=3)  # wrong
vitrail.create("ViT-B/16", num_classes=10)  # wrong
vitrail.create("ViT-B/16", classes="ten")  # wrong
vitrail.create("ViT-B/16", pool="mean")  # wrong
vitrail.create("ViT-B/16", resolution=(1, 2, 3))  # wrong
vitrail.create("ViT-B/16", "ViT-L/16")  # wrong
vitrail.create()  # wrong

images = torch.zeros(1, 3, 96, 192)
model.reset_classifier(2)
model.reset_classifier("two")  # wrong
features: torch.Tensor = model.features(images)
maps: list[torch.Tensor] = model.feature_maps(images, layers=(0, -1), normalise=False)
tokens: torch.Tensor = model.layer_tokens(images)  # wrong
model.layer_tokens(images, layers=["last"])  # wrong
attention = vitrail.look(model, images, gradients=True).attention[0].mean()
vitrail.look(model, images, gradient=True)  # wrong

names: list[str] = vitrail.list_models("ViT*")
vitrail.list_models(["ViT*"])  # wrong
bundle = vitrail.load("fashion")
vitrail.save(dataclasses.replace(bundle, labels=("a", "b")), "folder", force=True)
vitrail.save("folder", bundle)  # wrong
vitrail.Bundle(model=model, preprocess=vitrail.Preprocess(), label=("a", "b"))  # wrong
answers = vitrail.Classifier(bundle, threads=1).predict([images.numpy()], top_k=3)
vitrail.Classifier(bundle).predict(["a.jpg"], topk=3)  # wrong
vitrail.models("ViT*")  # wrong

result = vitrail.train("photos", "ViT-S/16", epochs=20, lr=1e-3, settings={"clip": 1.0}, workers=0, output="run")
accuracy: float | None = result.accuracy
vitrail.train(([images.numpy()], ["cat"]), "ViT-S/16", callback=lambda step: step.loss < 0.1, patience=3)
vitrail.train("photos", model, epochs=20)  # wrong
vitrail.train("photos", "ViT-S/16", epochs="20")  # wrong
vitrail.train("photos", "ViT-S/16", epochs=20, workers="none")  # wrong
vitrail.train("photos", "ViT-S/16", 20)  # wrong
vitrail.train("photos", "ViT-S/16", callback=lambda: True)  # wrong
tuned = vitrail.finetune(bundle, "photos", resolution=(224, 384), recipe="frozen").bundle
vitrail.finetune("photos")  # wrong
right: int = vitrail.evaluate(tuned, "photos", "val", protocol="knn", neighbours=10).right
vitrail.evaluate(tuned, "photos", protocol="nearest")  # wrong
vitrail.evaluate(tuned, "photos", neighbors=10)  # wrong
label: str | None = vitrail.predict("run/bundle", ["a.jpg", "b.jpg"], top_k=3)[0].label
vitrail.predict("run/bundle", images.numpy(), jpeg="fast")  # wrong
vitrail.predict("run/bundle", "photos", topk=3)  # wrong
vitrail.evaluate(tuned, "photos", against="fashion", output="answers.csv")
errors: int = len(vitrail.doctor("photos").errors)
vitrail.runs(["a", "b"], page="pages").to_json()
vitrail.runs()  # wrong
vitrail.convert("deit-ti16.in1k", "deit", verify=False)["proofs"]
vitrail.convert("deit-ti16.in1k")  # wrong
vitrail.rename("deit", {"cat": "dog"}, output="dogs")["labels"]
vitrail.rename("deit")  # wrong
vitrail.export("deit", "out", to="onnx", batch=8)
vitrail.export("deit", "out")  # wrong
vitrail.export("deit", "out", to="onnx", bach=8)  # wrong
vitrail.bench("deit", threads=2).to_json()
page: str = vitrail.explain("fashion", output="page").name
vitrail.explain("fashion")  # wrong
vitrail.compare("digits", output="lab", seeds=2, families=["vit", "mlp"])
vitrail.compare("digits", output="lab", seeds="two")  # wrong
vitrail.weights("deit")
vitrail.create("deit-ti16.in1k", pretrained=True, classes=2)
vitrail.create("deit-ti16.in1k", pretrained="yes")  # wrong
vitrail.faces.enroll("fashion", "gallery", "Ann", ["a.jpg", "b.jpg"])
vitrail.faces.train("people", model="FaceViT-Ti", epochs=3, output="run")
vitrail.faces.train("people", model="FaceViT-Ti", epochs="3")  # wrong
vitrail.faces.calibrate("fashion", "gallery", "people", far=0.01, task="both")
vitrail.faces.calibrate("fashion", "gallery", "people", far=0.01, task="all")  # wrong
