for (const report of document.querySelectorAll(".elasticlib-report")) {
  // Hide labels that would overlap the label before them.
  const thin = () => report.querySelectorAll(".thin").forEach(row => {
    let right = -Infinity;
    for (const label of row.querySelectorAll(":scope > span:not(.mark)")) {
      label.style.visibility = "";
      const box = label.getBoundingClientRect();
      if (box.left < right) label.style.visibility = "hidden";
      else right = box.right + 4;
    }
  });
  new ResizeObserver(thin).observe(report);
  thin();
  // Show the tooltip of what is tapped, because a phone cannot hover.
  const tip = report.appendChild(document.createElement("output"));
  report.onclick = event => { tip.textContent = event.target.closest("[title]")?.title ?? ""; };
}
